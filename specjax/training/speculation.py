"""A target with a proposer, as options: what jobs that decode have in common."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from specjax.call import check_length, conversations, encode
from specjax.decoding import Decoder
from specjax.flags import KINDS, NUMBERS, choose, load_models, make_drafter
from specjax.models import LanguageModel
from specjax.rules import RULES
from specjax.sampling import Sampling
from specjax.training.mesh import MeshOptions, mesh_sizes
from specjax.training.options import REQUIRED, at_least, option, within
from specjax.types import Params


@dataclasses.dataclass(frozen=True)
class SpeculationOptions(MeshOptions):
    """The models, and how they decode; named as in `specjax bench`."""

    target: str = option(REQUIRED, "folder of the target, or org/name on the Hub")
    draft: str | None = option(None, "of the draft, likewise; one with other tokens is translated")
    adapter: str | None = option(None, "folder of Medusa heads")
    dtype: str = option("float32", "of both models", choices=("float32", "bfloat16", "float16"))
    proposer: str | None = option(
        None, "by default what there is a folder for, else ngram", choices=KINDS
    )
    num_drafts: int = option(4, "guesses per step (gamma), or depth")
    branching: tuple[int, ...] = option((3, 2, 1), "tree: children a node, by level")
    width: int = option(4, "dynamic-tree: nodes expanded a level, and children of each")
    num_nodes: int = option(16, "dynamic-tree: nodes kept, the root included")
    exit_layer: int | None = option(
        None, "early-exit: layers of the target that guess; by default half"
    )
    confidence_threshold: float = option(0.0, "end a chain behind a guess less probable than this")
    rule: str = option("match", "which guesses are kept", choices=sorted(RULES))
    max_new_tokens: int = option(128, "per prompt")
    temperature: float = option(0.0, "0 is greedy")
    top_k: int = option(0, "0 keeps all tokens")
    top_p: float = option(1.0, "1 keeps all tokens")
    min_p: float = option(0.0, "0 keeps all tokens")
    seed: int = option(0, "of the sampling")

    def __post_init__(self):
        super().__post_init__()
        at_least(self, 1, "num_drafts", "max_new_tokens")
        within(self, 0, 2**32 - 1, "seed")
        Sampling.create(1, **self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def load_speculation(
    options: SpeculationOptions, prompts: Any
) -> tuple[LanguageModel, Decoder, Params, list[list[int]]]:
    """The target, a decoder with room for the prompts and what follows them, its arrays, and the prompts.

    Args:
      prompts: a function from the target to token ids.

    Raises:
      ValueError: models, proposer and prompts that do not fit together, and the cure.
    """
    # A number at its default was not asked for: it may belong to another proposer.
    fields = dataclasses.asdict(options).items()
    asked = argparse.Namespace(
        **{k: v for k, v in fields if k not in NUMBERS or v != NUMBERS[k].default}
    )
    asked.mesh = mesh_sizes(options)
    kind = choose(asked)
    target, draft = load_models(asked, [kind])
    drafter = make_drafter(asked, kind, target, draft)
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


def read_prompts(target: LanguageModel, path: str) -> list[list[int]]:
    """Token ids of each line: of its `prompt`, or of its `messages` as the target's chat template writes them.

    Raises:
      ValueError: a line is something else, or there is none.
    """
    found: list[Sequence[int]] = []
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            if "messages" in fields:
                found += conversations(target, None, [fields["messages"]])
            else:
                found += encode(target, [fields["prompt"]])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f'{path}, line {number}: it must be an object like {{"prompt": "..."}} or {{"messages": [...]}} '
                f"({error!r})"
            ) from None
    if not found:
        raise ValueError(f"{path} holds no prompt")
    return [list(ids) for ids in found]
