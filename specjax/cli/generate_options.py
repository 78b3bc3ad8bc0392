"""The options of `specjax generate`."""

from __future__ import annotations

import dataclasses

from specjax.generation import Request
from specjax.options.constraints import ConstraintOptions
from specjax.options.fields import option
from specjax.options.models import DeviceOptions, Devices, ModelOptions
from specjax.options.processes import ProcessOptions
from specjax.options.prompts import PromptOptions
from specjax.options.sampling import ProcessorOptions, SamplingOptions
from specjax.options.speculation import ProposerOptions, RuleOptions


@dataclasses.dataclass(frozen=True)
class ChatOptions(PromptOptions):
    """The prompts, which may be messages."""

    chat: bool = option(
        False, "treat each prompt as a user's message, and apply the target's chat template"
    )


@dataclasses.dataclass(frozen=True)
class DraftDeviceOptions(DeviceOptions, ProcessOptions):
    """The devices of the target and of the draft."""

    draft_mesh: str | None = option(
        None,
        "devices of the draft alone, after those of --mesh: it drafts while the target verifies",
        metavar="data=N,model=M",
    )

    def devices(self) -> Devices:
        own = self.sizes("draft-mesh", self.draft_mesh)
        return dataclasses.replace(super().devices(), draft_sizes=own)


@dataclasses.dataclass(frozen=True)
class GenerateOptions(
    DraftDeviceOptions, ConstraintOptions, ProcessorOptions, SamplingOptions, RuleOptions,
    ProposerOptions, ModelOptions, ChatOptions,
):  # fmt: skip
    """The options of `specjax generate`."""

    group = "output"

    logprobs: int | None = option(
        Request.logprobs,
        "with --json: print the log-probability of each token and of the N most probable ones",
        metavar="N",
    )
    compare: bool = option(True, "skip the comparison with plain decoding")
    plot: str | None = option(
        None, "draw the tree of the Medusa heads and its measured acceptance to this file"
    )
    colour: bool = option(
        False, "colour the tokens that were accepted drafts, by depth; this decodes once more",
        names=("--color",),
    )  # fmt: skip
    json: bool = option(False, "print one JSON object and nothing else")
    out: str | None = option(
        None, "write JSON lines to this file, one a prompt, each with a seed of its own; the same "
        "command goes on with a file that is not finished", metavar="FILE",
    )  # fmt: skip
    ray_workers: int | None = option(
        None, "with --out: so many processes, which Ray Data starts and watches", metavar="N"
    )
    slots: int = option(8, "with --out: prompts that a process decodes at once")
    capacity: int = option(2048, "with --out: tokens of a prompt with its output")
