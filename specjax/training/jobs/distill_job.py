"""The job of `train.distill` with its target in memory."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax import Array
from jax.sharding import Mesh

from specjax.contract import Arrays
from specjax.decoding import Decoder
from specjax.files import TOKENIZER
from specjax.methods import DraftModel
from specjax.models import LanguageModel, LinenModel, head_matrix
from specjax.parallel import row_parts, to_host
from specjax.proposers import NoProposer
from specjax.rules import Match
from specjax.sampling import Sampling
from specjax.training import accepted, online
from specjax.training.corpus import Tokens
from specjax.training.divergences import DIVERGENCES, blend
from specjax.training.jobs.distill_options import ACCEPTED_LENGTH, DistillOptions
from specjax.training.losses import (
    Teacher,
    against,
    agreement,
    chunked,
    chunked_rows,
    log_draft,
    log_target,
    with_cap,
)
from specjax.training.material import held_out_prompts, held_out_rows, learned
from specjax.training.measure import measure_tau
from specjax.training.mesh import lay_batch
from specjax.training.mixture import Mixture
from specjax.training.sources import DRAFT, mixed_rows
from specjax.training.student import initial_params, read, save_student
from specjax.training.targets import reader
from specjax.training.top import folded, top_of
from specjax.training.written import Written
from specjax.types import DecodeState, Params

Batch = Mapping[str, Array]
"""A batch of `Distill.batch`, as the traced loss sees it."""

ROWS = 4
"""Rows of a held-out batch."""


@dataclasses.dataclass(eq=False)
class Distill:
    """Trains a draft by a divergence from a frozen target, or by the expected accepted length."""

    options: DistillOptions
    draft: LinenModel
    target: LanguageModel
    text: Tokens | Mixture | None
    held_out: Tokens | Mixture | Written
    written: Written | None
    end: int | None  # the token that starts a document, if documents are isolated; else None
    inputs: dict[str, str]
    mesh: Mesh | None = None
    trained: tuple[str, ...] | None = None  # which of the draft's parameters; None: all
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # for `run.json`

    def __post_init__(self):
        # The settings are constants of the compiled program, so filters that are off cost nothing.
        plain = self.options.settings == {"temperature": 1, "top_k": 0, "top_p": 1}
        self.serving = None if plain else Sampling.create(1, **self.options.settings)
        self.reader = reader(self.target)
        self.cap = self.draft.module.config.logit_softcap
        # Equal tokenizers may be padded to other sizes; ids beyond the smaller one are not tokens.
        own, theirs = self.draft.vocab_size, self.target.model.vocab_size
        self.size = None if own == theirs else min(own, theirs)
        # Of an early exit the other parameters are the target's.
        names = jax.eval_shape(self.draft.init, jax.random.key(0)) if self.trained else ()
        self.shared = tuple(name for name in names if name not in (self.trained or ()))

    def with_options(self, options: DistillOptions, facts: Mapping[str, Any]) -> Distill:
        """Returns the same job with other options, and more for its `run.json`."""
        return dataclasses.replace(self, options=options, facts={**self.facts, **facts})

    @property
    def frozen(self) -> Arrays:
        return self.target.params

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        assert self.target.tokenizer is not None  # `gather` has checked it
        return self.target.tokenizer

    def init(self) -> Arrays:
        if self.trained is None:
            return initial_params(self.draft, self.options, self.mesh)
        return {
            name: jax.tree.map(lambda leaf: jnp.copy(leaf.astype(jnp.float32)), self.frozen[name])
            for name in self.trained
        }

    def whole(self, params: Arrays, frozen: Arrays) -> Arrays:
        """Returns all parameters of the draft: the trained ones, and the target's."""
        return {**{name: frozen[name] for name in self.shared}, **params}

    def batch(self, step: int) -> dict[str, np.ndarray]:
        o, rows = self.options, self.options.batch_size
        batch, counts = mixed_rows(o, step, self.text, self.written)
        share = min(1.0, step / o.anneal_steps) if o.anneal_steps else 1.0
        return {
            **batch,
            "own": np.arange(rows) < counts[DRAFT],
            "share": np.full(rows, share, np.float32),
        }

    def loss(self, params: Arrays, frozen: Arrays, batch: Batch) -> tuple[Array, dict[str, Array]]:
        o, params = self.options, self.whole(params, frozen)
        if o.online:
            return self._online(params, frozen, batch)
        tokens = self._continue(params, batch) if o.draft_fraction else batch["tokens"]
        if o.loss == ACCEPTED_LENGTH:
            return self._accepted_length(params, frozen, batch, tokens)
        weight = learned(batch["drawn"], o.learn_prompts).reshape(-1)
        hidden, rows = self._read(params, frozen, tokens, batch.get("starts"))
        shared = (self._teacher(frozen), self.serving, self._share(batch))
        total = chunked(with_cap(against(DIVERGENCES[o.loss], o.top), self.cap, self.size))(
            hidden, head_matrix(params), (weight, rows), shared
        )
        return total / jnp.maximum(weight.sum(), 1), {"weight": weight.sum()}

    def _accepted_length(
        self, params: Arrays, frozen: Arrays, batch: Batch, tokens: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Returns 1 - E[N] / gamma, blended with forward KL while it is annealed."""
        o = self.options
        kl, ratio, alpha = self._rows(accepted.statistics, params, frozen, tokens, True)
        # A window of text continues after an EOS, but a decoder stops there.
        ends = jnp.isin(tokens[:, 1:], jnp.array(self.target.eos, jnp.int32))
        ratio = jnp.where(ends, 0, ratio)
        length, counts = accepted.expected_accepted_length(
            ratio, alpha, batch["drawn"], batch["limit"], o.num_drafts
        )
        weight = counts.sum()
        each = rejected = 1 - length / o.num_drafts
        if o.anneal_steps:
            share = batch["share"][:, None]
            each = share * rejected + (1 - share) * kl[:, : rejected.shape[1]]
        mean = jnp.sum(counts * each) / jnp.maximum(weight, 1)
        expected = jnp.sum(counts * length) / jnp.maximum(weight, 1)
        return mean, {"weight": weight, "expected_accepted_length": expected}

    def _teacher(self, frozen: Arrays) -> Teacher:
        cap = self.target.model.module.config.logit_softcap
        return Teacher(head_matrix(frozen), cap, self.size)

    def _share(self, batch: Batch) -> Array | None:
        """Returns the weight of `--loss` against forward KL; None where nothing is annealed."""
        return batch["share"][0] if self.options.anneal_steps else None

    def _read(
        self, params: Arrays, frozen: Arrays, tokens: Array, starts: Array | None = None
    ) -> tuple[Array, Array]:
        """Returns hidden states [B * T, E] of the draft and of the target."""
        inputs = tokens[:, :-1]
        target = read(self.reader, frozen, inputs, self.end, starts)
        return read(self.draft, params, inputs, self.end, starts), jax.lax.stop_gradient(target)

    def _rows(
        self,
        statistics: Callable[..., Array],
        params: Arrays,
        frozen: Arrays,
        tokens: Array,
        labelled: bool,
    ) -> Array:
        """Returns the statistics [S, B, T] of each token; `labelled` ones use the next token."""
        hidden, target = self._read(params, frozen, tokens)
        rows = (tokens[:, 1:].reshape(-1), target) if labelled else (target,)
        shared = (self._teacher(frozen), self.serving)
        values = chunked_rows(with_cap(statistics, self.cap, self.size))(
            hidden, head_matrix(params), rows, shared
        )
        return jnp.moveaxis(values.reshape(len(tokens), -1, values.shape[-1]), -1, 0)

    def _prefill(self, decoder: Decoder, params: Params, batch: Batch) -> DecodeState:
        o, keys = self.options, online.row_keys(self.options.seed, batch["number"])
        return online.begin(decoder, params, batch["tokens"], o.sampled_prompt, o.settings, keys)

    def _continue(self, params: Arrays, batch: Batch) -> Array:
        """Returns the tokens of a batch; the draft as it is now generates its `own` rows."""
        tokens, own = batch["tokens"], batch["own"]
        decoder = Decoder(self.draft, NoProposer(), Match(), (), tokens.shape[1])
        arrays = Params(jax.lax.stop_gradient(params))

        def write() -> Array:
            written = decoder.run(arrays, self._prefill(decoder, arrays, batch)).tokens
            return jnp.where(own[:, None], written[:, : tokens.shape[1]], tokens)

        return jax.lax.cond(own.any(), write, lambda: tokens)

    def speculator(self, capacity: int, eos: tuple[int, ...] = ()) -> Decoder:
        """Returns a decoder of the target with the draft as it is being trained."""
        size = self.target.model.vocab_size
        proposer = DraftModel(self.draft, size, self.options.num_drafts)
        return Decoder(self.target.model, proposer, Match(), eos, capacity)

    def _online(
        self, params: Arrays, frozen: Arrays, batch: Batch
    ) -> tuple[Array, dict[str, Array]]:
        o = self.options
        decoder = self.speculator(o.sequence_length)
        arrays = Params(frozen, jax.lax.stop_gradient(params))
        rollout = online.roll_out(
            decoder, arrays, self._prefill(decoder, arrays, batch), o.online_steps
        )
        hidden = online.read_branches(self.draft, params, rollout)

        def loss(logits: Array, weight: Array, target: Array, share: Array | None) -> Array:
            theirs, mine = log_target(target), log_draft(logits, self.serving)
            if o.top:
                theirs, mine = folded(top_of(theirs, o.top), mine)
            return jnp.sum(weight * blend(DIVERGENCES[o.loss], share)(theirs, mine))

        target = rollout.logits.reshape(-1, rollout.logits.shape[-1])[:, : self.size]
        weight = jnp.ones(len(target))
        total = chunked(with_cap(loss, self.cap, self.size))(
            hidden.reshape(len(target), -1),
            head_matrix(params),
            (weight, target),
            (self._share(batch),),
        )
        tau = rollout.emitted.mean() / o.online_steps
        return total / len(target), {"online_tau": tau}

    @functools.cached_property
    def _measure(self) -> Callable[..., Array]:
        def mean(
            params: Arrays, frozen: Arrays, tokens: Array, drawn: Array, counted: Array
        ) -> Array:
            weight = learned(drawn, self.options.learn_prompts) * counted[:, None]
            values = self._rows(agreement, params, frozen, tokens, False)
            return (weight * values).sum((1, 2)) / weight.sum()

        return jax.jit(mean)

    def evaluate(self, params: Arrays) -> dict[str, float]:
        o, params = self.options, self.whole(params, self.frozen)
        means = []
        for i in range(o.eval_batches):
            tokens, drawn = held_out_rows(self.held_out, i, ROWS, o.sequence_length)
            batch = (tokens, drawn, np.ones(ROWS, np.float32))
            # Padding rows have weight 0, so every mesh measures the same text.
            batch = lay_batch(filled(batch, row_parts(self.mesh)), self.mesh)
            means.append(to_host(self._measure(params, self.frozen, *batch)))
        kl, alpha, same = np.mean(means, axis=0)
        report = {
            "held_out_kl": float(kl),
            "held_out_alpha": float(alpha),
            "held_out_same_argmax": float(same),
        }
        return report | self._tau(params)

    def _tau(self, params: Arrays) -> dict[str, float]:
        """Returns tau on held-out prompts with the decoder, if --eval-prompts asks for it."""
        o = self.options
        if not o.eval_prompts:
            return {}
        longest = o.sequence_length - o.eval_tokens
        prompts = held_out_prompts(
            self.held_out, o.eval_prompts, o.sequence_length, o.sampled_prompt, longest
        )
        room = max(map(len, prompts)) + o.eval_tokens + o.num_drafts
        decoder = self.speculator(room, self.target.eos)
        arrays = Params(self.target.params, params)
        return measure_tau(decoder, arrays, prompts, o.eval_tokens, settings=o.settings)

    def show(self, batch: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens, and which of them are learned, for --show-mask.

        Raises:
          ValueError: with --online there are no tokens before a step.
        """
        if self.options.online:
            raise ValueError(
                "--show-mask: with --online the draft learns from drafts that it makes in the step"
            )
        return batch["tokens"], np.asarray(learned(batch["drawn"], self.options.learn_prompts))

    def goal(self, report: dict[str, float]) -> float:
        """Returns tau where it is measured (it can fall while the loss improves); else -KL."""
        return report.get("tau", -report["held_out_kl"])

    def export(self, params: Arrays, folder: pathlib.Path) -> None:
        # The target's EOS tokens may differ from the corpora's, and there may be several.
        files = {} if self.options.initial else self.target.files
        save_student(
            folder,
            self.draft,
            self.whole(params, self.frozen),
            self.tokenizer,
            self.target.eos,
            {name: files[name] for name in TOKENIZER if name in files},
            self.options.start,
        )


def filled(arrays: Arrays, parts: int) -> Arrays:
    """Returns arrays padded with rows of zeros until `parts` divides their number of rows."""
    return jax.tree.map(
        lambda x: np.pad(x, ((0, -len(x) % parts), *((0, 0),) * (x.ndim - 1))), arrays
    )
