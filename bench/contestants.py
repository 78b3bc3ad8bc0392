"""The contestants: specjax and transformers, each a function from prompts to new tokens."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from bench.imposed import Imposed, ImposedTree, Script
from bench.weights import Pair, TorchModel
from specjax import Decoder, DraftModel, DraftTree, Match, NGram, NoProposer, Params, Sampling
from specjax.contract import Proposer
from specjax.measure import PromptCounts
from specjax.proposers import StaticTree
from specjax.types import Arrays

ROUNDED = {"int8": "int8 target", "int4": "int4 target"}
"""Precision of rounded weights -> the name of plain decoding with them, whose text differs."""

IN_FEW_BITS = {f"{precision} target and draft": rounded for precision, rounded in ROUNDED.items()}
"""A draft model with both models rounded -> plain decoding of its target."""

Imposition = tuple[np.ndarray, np.ndarray]
"""The text [B, L] that the target writes, and bool [B, L]: is the draft of this token right?"""


@dataclasses.dataclass(frozen=True)
class Contestant:
    """`run(prompts [B, P], new)` returns tokens [B, new] when all work has finished.

    `counts` and `prefill` grow by one entry for each run, or stay empty.
    """

    name: str
    library: str
    num_drafts: int
    run: Callable[[np.ndarray, int], np.ndarray]
    counts: list[PromptCounts] = dataclasses.field(default_factory=list)
    prefill: list[float] = dataclasses.field(default_factory=list)  # seconds before decoding began


def ours(
    target: specjax.LanguageModel,
    draft: specjax.LanguageModel | None,
    kind: str,
    num_drafts: int = 0,
    script: Imposition | None = None,
    width: int = 1,
    name: str | None = None,
    branching: tuple[int, ...] = (),
) -> Contestant:
    """specjax with a proposer: `plain`, `draft`, `tree` or `ngram`.

    Args:
      target, draft: loaded models.
      kind: of proposer.
      num_drafts: gamma.
      script: the imposed acceptance; None for the real one.
      width: tokens in a pass of plain decoding: 1, or as many as in a speculative step.
      name: in the report; by default the kind.
      branching: of a tree.
    """
    proposer: Proposer
    arrays: Arrays = None
    if kind == "draft":
        assert draft is not None
        proposer = DraftModel(draft.model, target.model.vocab_size, num_drafts)
        arrays = draft.params
    elif kind == "tree":
        assert draft is not None
        proposer = DraftTree(draft.model, target.model.vocab_size, branching)
        arrays = draft.params
    else:
        proposer = NGram(num_drafts) if kind == "ngram" else NoProposer(num_nodes=width)
    if script is not None and kind != "plain":
        size = target.model.vocab_size
        is_tree = isinstance(proposer, StaticTree)
        proposer = ImposedTree(proposer, size) if is_tree else Imposed(proposer, size)
        arrays = Script(arrays, jnp.asarray(script[0], jnp.int32), jnp.asarray(script[1]))
    params = Params(target.params, arrays)
    counts: list[PromptCounts] = []
    prefill: list[float] = []

    def run(prompts: np.ndarray, new: int) -> np.ndarray:
        started = time.perf_counter()
        rows, length = prompts.shape
        capacity = -(-(length + new) // 128) * 128
        decoder = Decoder(target.model, proposer, Match(), (), capacity)
        lengths = np.full(rows, length, np.int32)
        keys = jax.random.split(specjax.make_key(0), rows)
        sampling = Sampling.create(rows, 0.0)
        state = decoder.prefill(
            params, prompts, lengths, limit=lengths + np.int32(new), sampling=sampling, key=keys
        )
        jax.block_until_ready(state)
        prefill.append(time.perf_counter() - started)
        state = jax.block_until_ready(decoder.run(params, state))
        stats = state.stats
        fields = stats.target_passes, stats.emitted, stats.tested, stats.accepted
        counts.append(PromptCounts(*map(np.asarray, fields)))
        return np.asarray(state.tokens)[:, length : length + new]

    default = kind if kind != "plain" or width == 1 else f"plain at {width} rows"
    return Contestant(name or default, "specjax", num_drafts, run, counts, prefill)


def theirs(
    pair: Pair,
    kind: str,
    num_drafts: int = 0,
    script: Imposition | None = None,
    compiled: bool = False,
) -> Contestant:
    """transformers' generate: `plain`, `draft` (assisted generation) or `ngram` (prompt lookup)."""
    forward: Callable[..., object] | None = None

    def run(prompts: np.ndarray, new: int) -> np.ndarray:
        nonlocal forward
        import torch

        model = pair.peer("target")
        options: dict[str, object] = {}
        if kind == "draft":
            options["assistant_model"] = assistant = pair.peer("draft")
            assistant.generation_config.num_assistant_tokens = num_drafts
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
        if kind == "ngram":
            options["prompt_lookup_num_tokens"] = num_drafts
        if compiled:
            forward = model.forward = forward or torch.compile(model.forward, dynamic=True)
        ids = torch.from_numpy(prompts).long().to(model.device)
        try:
            with torch.inference_mode(), _scripted(model, num_drafts, script):
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new,
                    min_new_tokens=new, pad_token_id=0, **options,
                )  # fmt: skip
        finally:
            vars(model).pop("forward", None)  # other contestants run the same model
        return out[:, prompts.shape[1] :].cpu().numpy()

    return Contestant(kind + (" compiled" if compiled else ""), "transformers", num_drafts, run)


class _Generator(Protocol):
    """transformers' candidate generator."""

    get_candidates: Callable[..., object]


class _scripted:
    """A context in which `model`'s candidate generators work as usual, but draft `script`."""

    def __init__(self, model: TorchModel, num_drafts: int, script: Imposition | None) -> None:
        self.model, self.num_drafts, self.script = model, num_drafts, script

    def __enter__(self) -> None:
        if self.script is None:
            return
        import torch

        make, drafts = (
            type(self.model)._get_candidate_generator.__get__(self.model),
            self.num_drafts,
        )
        text, right = (torch.from_numpy(np.asarray(x)) for x in self.script)
        vocab = self.model.config.vocab_size

        def scripted(*args: object, **options: object) -> _Generator:
            generator = make(*args, **options)
            draft = generator.get_candidates

            def candidates(
                ids: torch.Tensor, *rest: object, **more: object
            ) -> tuple[torch.Tensor, None]:
                draft(ids, *rest, **more)
                start = ids.shape[1]
                said = text[:1, start : start + drafts].to(ids)
                wrong = (said + 1) % vocab
                said = torch.where(right[:1, start : start + drafts].to(ids.device), said, wrong)
                return torch.cat([ids, said], dim=1), None

            generator.get_candidates = candidates
            return generator

        self.model._get_candidate_generator = scripted

    def __exit__(self, *_: object) -> None:
        self.model.__dict__.pop("_get_candidate_generator", None)
