"""The common options of jobs that decode: a target with a proposer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from specjax.decoding import Decoder
from specjax.generation import check_length
from specjax.models import LanguageModel
from specjax.options.fields import REQUIRED, SEED, count, inside, option
from specjax.options.models import Devices, ModelOptions, choose, load_models, make_drafter
from specjax.options.speculation import KINDS, ProposerOptions, given
from specjax.rules import RULES
from specjax.sampling import Sampling
from specjax.training.mesh import MeshOptions, mesh_sizes
from specjax.training.targets import TargetOptions
from specjax.types import Params


@dataclasses.dataclass(frozen=True)
class SpeculationOptions(MeshOptions, ProposerOptions, TargetOptions, ModelOptions):
    """The models, and the options of decoding, which are named as in `specjax bench`."""

    group = "decoding"

    target: str = option(REQUIRED, "folder of the target, or org/name on the Hub")
    draft: str | None = option(
        None, "folder of the draft, or org/name; other tokens than the target's are translated"
    )
    drafter: str | None = option(
        None, "folder of a drafter that was trained for the target (Medusa, EAGLE-3, DFlash, ...)"
    )
    dtype: str | None = option(
        None,
        "type of both models; in int8 the draft keeps the default, which is float32 on a CPU, else "
        "bfloat16",
        choices=("float32", "bfloat16", "float16", "int8"),
    )
    proposer: str | None = option(
        None,
        "proposer; default: drafter with --drafter, draft with --draft, else ngram",
        choices=KINDS,
    )
    rule: str = option("match", "rule that accepts drafts", choices=sorted(RULES))
    max_new_tokens: int = count(128, "most new tokens per prompt")
    temperature: float = option(0.0, "sampling temperature; 0: greedy")
    top_k: int = option(0, "sample from this many most probable tokens; 0: all")
    top_p: float = option(1.0, "sample from the fewest tokens of this total probability; 1: all")
    min_p: float = option(
        0.0, "sample from tokens at least this probable, relative to the best; 0: all"
    )
    seed: int = option(0, "seed of the sampling", SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        inside(self, "[1, inf)", "num_drafts", "width", "num_nodes")
        Sampling.create(1, **self.settings)

    @property
    def settings(self) -> dict[str, float]:
        """The sampling settings, as `Sampling.create` takes them."""
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def load_speculation(
    options: SpeculationOptions, prompts: Callable[[LanguageModel], list[list[int]]]
) -> tuple[LanguageModel, Decoder, Params, list[list[int]]]:
    """Returns the target, a decoder with space for the prompts, its arrays, and the prompts' ids.

    `prompts` returns the token ids of the prompts for a target.

    Raises:
      ValueError: models, proposer and prompts do not fit together; the message has the cure.
    """
    kind = choose(options)
    devices = Devices(mesh_sizes(options))
    models = load_models(options, [kind], devices=devices, lora=options.lora)
    target, drafter = models.target, make_drafter(kind, models, given(options))
    proposer, arrays = drafter.proposer, drafter.arrays(target)
    ids = prompts(target)
    check_length("target", target, ids, options.max_new_tokens)
    if drafter.reader is not None:
        check_length("draft", drafter.reader, ids, options.max_new_tokens)
    room = max(map(len, ids)) + options.max_new_tokens
    decoder = Decoder(
        target.model, proposer, RULES[options.rule](), target.eos, max(room, proposer.num_nodes)
    )
    return target, decoder, Params(target.params, arrays), ids
