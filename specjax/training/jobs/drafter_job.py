"""The job of `train.drafter` with its target in memory."""

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

from specjax.contract import Arrays, BlockSource, Proposer, Source
from specjax.decoding import Decoder
from specjax.drafters import save_drafter
from specjax.methods import PublishedDrafter, SharedParams, own_shardings, sizes_of
from specjax.models import LanguageModel, head_matrix
from specjax.parallel import TRAINING_RULES, put, row_parts, to_host
from specjax.proposers import Chain, ChoiceTree
from specjax.rules import Match
from specjax.training.dataset import initial_hash
from specjax.training.drafters import Drafts, Guess, Learner, Lesson, draw_anchors
from specjax.training.features import Features
from specjax.training.jobs.drafter_initial import initial_params
from specjax.training.jobs.drafter_options import DrafterOptions
from specjax.training.losses import chunked_with_rows
from specjax.training.material import Material, held_out_prompts, held_out_rows, learned
from specjax.training.measure import measure_tau
from specjax.training.mesh import lay_batch
from specjax.training.objectives import OBJECTIVES, binary_cross_entropy, mean_of, per_row
from specjax.training.online import begin, roll_out, row_keys
from specjax.training.record import named
from specjax.training.sources import mixed_rows
from specjax.training.targets import reader
from specjax.training.written import Written
from specjax.types import Params

Batch = Mapping[str, Array]
"""A batch of `TrainDrafter.batch`, as the traced loss sees it."""


@dataclasses.dataclass(eq=False)
class TrainDrafter:
    """Trains a drafter of any kind in `KINDS`; its parameters are those of `SharedParams.own`."""

    options: DrafterOptions
    target: LanguageModel
    learner: Learner
    material: Material
    written: Written | None  # sequences of the target
    known: np.ndarray | None  # [U] the drafter's tokens, if its vocabulary is reduced
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        self.frozen: Arrays = self.target.params
        self.reader = reader(self.target)
        self.inputs = {**self.material.inputs, **initial_hash(self.options.initial)}
        self.tokenizer: tokenizers.Tokenizer | None = self.target.tokenizer
        # The target's output matrix may be its embedding.
        head = "head" if "head" in self.frozen else "embedding"
        self.used = ("embedding",) if self.learner.own_head else tuple({"embedding", head})
        size, self.to_draft = self.target.model.vocab_size, None
        if self.known is not None:
            self.to_draft = np.full(size, -1, np.int32)
            self.to_draft[self.known] = np.arange(len(self.known))

    def init(self) -> Arrays:
        if self.options.initial is not None:
            own = initial_params(self.options, self.target, self.learner, self.to_draft)
            return self._laid(own)
        return self._laid(self.fresh())

    def fresh(self) -> Arrays:
        """Returns random parameters from `--seed`; an output matrix starts as the target's."""
        own = self.learner.init(jax.random.key(self.options.seed))
        if self.learner.own_head:
            matrix = head_matrix(self.frozen).astype(jnp.float32)
            matrix = matrix if self.known is None else jnp.take(matrix, self.known, axis=1)
            own["head"] = {"kernel": jnp.copy(matrix)}
        # The final norm feeds the target's matrix, so it starts as the target's own.
        return self._with_norm(own)

    def _laid(self, own: Arrays) -> Arrays:
        """Puts parameters onto the run's mesh."""
        if self.mesh is None:
            return own
        at = own_shardings(self.learner.source, own, self.mesh, TRAINING_RULES)
        return jax.tree.map(put, to_host(own), at)

    def _with_norm(self, own: Arrays) -> Arrays:
        part = "network" if "network" in own else "draft"
        theirs = self.frozen.get("norm", {}).get("weight")
        offset = self.target.model.module.config.norm_offset
        if theirs is None or theirs.shape != own[part]["norm"]["weight"].shape:
            return own
        weight = jnp.copy(theirs.astype(jnp.float32)) + offset
        return {**own, part: {**own[part], "norm": {"weight": weight}}}

    def batch(self, step: int) -> dict[str, np.ndarray]:
        made = mixed_rows(self.options, step, self.material.text, self.written)[0]
        if self.features is not None:
            made["states"] = self.features.of(made["tokens"][:, :-1])
        return made

    def held_out(self, first: int, rows: int) -> dict[str, np.ndarray]:
        """Returns held-out rows like those of a batch, beginning with row `first`."""
        o, index = self.options, first // rows
        tokens, drawn = held_out_rows(self.material.held_out, index, rows, o.sequence_length)
        return {"tokens": tokens, "drawn": drawn}

    @functools.cached_property
    def features(self) -> Features | None:
        """Returns the target's states on disk, with `--keep-features`."""
        o, config = self.options, self.target.model.module.config
        if not o.keep_features:
            return None
        taps = self.learner.source.taps
        depends = {
            **{name: self.inputs[name] for name in ("target", "tokenizer")},
            "dtype": str(self.target.model.dtype),
            "taps": taps,
            "sequence_length": o.sequence_length,
        }
        read = jax.jit(self._states)

        def compute(tokens: np.ndarray) -> np.ndarray:
            return to_host(read(self.frozen, lay_batch(tokens, self.mesh)))

        shape = (o.sequence_length, config.hidden_size * (1 + len(taps)))
        folder = pathlib.Path(o.out) / "features"
        return Features(folder, depends, shape, round(o.keep_features * 10**9), compute)

    def show(self, batch: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens, and which of them are learned, for --show-mask.

        Raises:
          ValueError: with --online there are no tokens before a step.
        """
        if self.options.online:
            raise ValueError(
                "--show-mask: with --online the target writes the tokens during the step"
            )
        return batch["tokens"], np.asarray(learned(batch["drawn"]))

    def shared(self, own: Arrays, frozen: Arrays) -> SharedParams:
        """Returns the parameters as the drafter's network takes them."""
        return SharedParams(own, {name: frozen[name] for name in self.used})

    def _states(self, frozen: Arrays, inputs: Array) -> Array:
        """Returns [B, T, E + F] the target's last hidden states and features, of tokens [B, T]."""
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
        out = self.reader.apply(frozen, inputs, positions, taps=self.learner.source.taps)
        assert out.features is not None  # every learner reads taps
        return jax.lax.stop_gradient(jnp.concatenate([out.hidden, out.features], axis=-1))

    def _chosen(self, batch: Batch) -> Drafts:
        """Returns drafts that start at random positions of a batch."""
        mask = learned(batch["drawn"])
        keys = row_keys(self.options.seed, batch["number"])
        anchors = draw_anchors(keys, mask, self.options.num_anchors)
        return Drafts(batch["tokens"], mask, *anchors)

    def _speculated(self, own: Arrays, frozen: Arrays, batch: Batch) -> Drafts:
        """Returns the drafts of the drafter while both models continue the texts of a batch."""
        o, tokens = self.options, batch["tokens"]
        room = tokens.shape[1]
        made = self.drafter(jax.lax.stop_gradient(own))
        decoder = Decoder(self.target.model, made.proposer, Match(), (), room)
        arrays = Params(frozen, self.shared(made.params, frozen))
        keys = row_keys(o.seed, batch["number"])
        state = begin(decoder, arrays, tokens, o.sampled_prompt, o.settings, keys)
        rolled = roll_out(decoder, arrays, state, o.online_steps)
        end = o.sampled_prompt + rolled.emitted[:, None]
        at = jnp.arange(room - 1) + 1
        mask = jnp.where((at >= o.sampled_prompt) & (at < end), 1.0, 0.0)
        return Drafts(rolled.text, mask, rolled.root, jnp.ones(rolled.root.shape))

    def _measured(
        self, own: Arrays, frozen: Arrays, batch: Batch, drafts: Drafts
    ) -> list[tuple[Guess, Array, Array, Array]]:
        """Returns for each depth the guess, its total weight, its summed loss, and alpha [B, A]."""
        o, params = self.options, self.shared(own, frozen)
        config, tokens = self.target.model.module.config, drafts.tokens
        states = batch.get("states")
        states = self._states(frozen, tokens[:, :-1]) if states is None else states
        states = states.astype(jnp.float32)
        hidden, features = states[..., : config.hidden_size], states[..., config.hidden_size :]
        lesson = Lesson(tokens, drafts.learned, features, drafts.anchors, drafts.present)
        objective = OBJECTIVES[o.loss or self.learner.objective]
        loss = chunked_with_rows(
            per_row(objective, self.learner.softcap, config.logit_softcap),
            trains_head=self.learner.trains_head,
        )
        shared, head = (head_matrix(frozen), self.known), self.learner.head(params)
        measured = []
        for guess in self.learner.guesses(params, lesson):
            at = jnp.minimum(guess.at, hidden.shape[1] - 1)
            label = jnp.take_along_axis(tokens, at + 1, axis=1).reshape(-1)
            label = label if self.to_draft is None else jnp.asarray(self.to_draft)[label]
            teacher = jnp.take_along_axis(hidden, at[..., None], axis=1)
            mine, theirs = (x.reshape(-1, x.shape[-1]) for x in (guess.hidden, teacher))
            total, alpha = loss(mine, head, (guess.weight.reshape(-1), label, theirs), shared)
            measured.append((guess, guess.weight.sum(), total, alpha.reshape(guess.weight.shape)))
        return measured

    def loss(self, params: Arrays, frozen: Arrays, batch: Batch) -> tuple[Array, dict[str, Array]]:
        o, metrics = self.options, {}
        decay = self.learner.decay if o.depth_decay is None else o.depth_decay
        total, whole, sure, counted = jnp.float32(0), 0.0, jnp.float32(0), jnp.float32(0)
        drafts = self._speculated(params, frozen, batch) if o.online else self._chosen(batch)
        for guess, weight, value, alpha in self._measured(params, frozen, batch, drafts):
            share = decay**guess.depth
            total, whole = total + share * value / jnp.maximum(weight, 1), whole + share
            metrics[f"alpha_{guess.depth}"] = mean_of(alpha, guess.weight)
            if guess.confidence is not None:
                sure = sure + share * jnp.sum(
                    guess.weight * binary_cross_entropy(guess.confidence, alpha)
                )
                counted = counted + share * weight
        total = total / whole
        if o.online:
            metrics["online_tau"] = drafts.learned.sum() / drafts.present.sum()
        # All rows have the same number of anchors, so parts of a batch count by their rows.
        metrics["weight"] = jnp.float32(len(batch["tokens"]))
        if self.learner.estimates:
            metrics["loss_confidence"] = sure / jnp.maximum(counted, 1)
            total = total + o.confidence_weight * metrics["loss_confidence"]
        return total, metrics

    def drafter(self, own: Arrays) -> PublishedDrafter:
        """Returns the drafter with these parameters, whose drafts are a chain."""
        if self.to_draft is not None:
            own = {**own, "to_draft": jnp.asarray(self.to_draft)}
        source = self.learner.source
        chain: Proposer
        if isinstance(source, BlockSource):
            chain = ChoiceTree(source)
        else:
            assert isinstance(source, Source)
            chain = Chain(source, self.options.num_drafts)
        shares = ("embedding",) if self.learner.own_head else ("embedding", "head")
        return PublishedDrafter(
            proposer=chain,
            params=own,
            name=self.options.kind,
            source=source,
            shares=shares,
            sizes=sizes_of(self.target, self.options.kind),
        )

    @functools.cached_property
    def _measure(self) -> Callable[..., Array]:
        def alphas(params: Arrays, frozen: Arrays, batch: Batch) -> Array:
            """Returns [2, D] sums of weight * alpha, and of weights."""
            measured = self._measured(params, frozen, batch, self._chosen(batch))
            sums = [(jnp.sum(g.weight * alpha), weight) for g, weight, _, alpha in measured]
            return jnp.array(sums).T

        return jax.jit(alphas)

    def evaluate(self, params: Arrays) -> dict[str, float]:
        o, sums = self.options, np.zeros((2, self.options.num_drafts))
        rows = -(-o.batch_size // row_parts(self.mesh)) * row_parts(self.mesh)
        for i in range(o.eval_batches):
            numbers = np.arange(i * rows, (i + 1) * rows, dtype=np.int32)
            batch = {**self.held_out(i * rows, rows), "number": numbers}
            batch = lay_batch(batch, self.mesh)
            sums = sums + np.asarray(to_host(self._measure(params, self.frozen, batch)), float)
        alpha = sums[0] / np.maximum(sums[1], 1)
        report = {f"held_out_alpha_{depth}": float(value) for depth, value in enumerate(alpha)}
        # Of a chain that is sampled, if acceptances of different depths were independent.
        report["held_out_length"] = float(1 + np.cumprod(alpha).sum())
        if o.eval_prompts:
            prompts = held_out_prompts(
                self.material.held_out,
                o.eval_prompts,
                o.sequence_length,
                o.sampled_prompt,
                o.sequence_length - o.eval_tokens,
            )
            drafter = self.drafter(params)
            room = max(map(len, prompts)) + o.eval_tokens + o.num_drafts + 1
            decoder = Decoder(self.target.model, drafter.proposer, Match(), self.target.eos, room)
            arrays = Params(self.frozen, self.shared(drafter.params, self.frozen))
            report |= measure_tau(decoder, arrays, prompts, o.eval_tokens, {"temperature": 0.0})
        return report

    @property
    def facts(self) -> dict[str, Any]:
        o, config = self.options, self.target.model.module.config
        models = {
            "target": named(o.words, config, self.target.num_params),
            "drafter": {
                "folder": o.initial,
                "kind": o.kind,
                "taps": self.learner.source.taps,
                "parameters": sum(x.size for x in jax.tree.leaves(jax.eval_shape(self.fresh))),
            },
        }
        return {"models": models}

    def goal(self, report: dict[str, float]) -> float:
        """Returns tau where it is measured; else the expected length of a sampled chain."""
        return report.get("tau", report["held_out_length"])

    def export(self, params: Arrays, folder: pathlib.Path) -> None:
        save_drafter(folder, self.drafter(params), self.target, self.options.layout, jnp.bfloat16)
