"""specjax train drafter: train a drafter that reads hidden states of its target.

--kind eagle3, peagle, dflash or dspark.  The target reads each batch once and stays frozen.  The
drafter learns from its hidden states at a few layers to predict what the target would say, from
many positions of every text at once.  With --teacher it learns from the hidden states that
train.teacher has recorded, and only the target's embedding and output matrix are in memory.
(`--kind model` and `--kind medusa` are train.distill and train.medusa.)

The exported folder is one that specjax.load_drafter reads, and the method's own tools, too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sys
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
from specjax.drafters import load_drafter, save_drafter
from specjax.methods import PublishedDrafter, SharedParams, own_shardings, sizes_of
from specjax.models import LanguageModel, head_matrix
from specjax.options.command import parse, run
from specjax.parallel import TRAINING_RULES, put, row_parts, to_host
from specjax.proposers import Chain, ChoiceTree
from specjax.rules import Match
from specjax.training import dataset
from specjax.training.dataset import initial_hash, model_hashes
from specjax.training.drafters import (
    Drafts,
    Guess,
    Learner,
    Lesson,
    draft_vocabulary,
    draw_anchors,
    mask_token,
    plan,
    token_counts,
)
from specjax.training.features import Features
from specjax.training.jobs import distill, medusa
from specjax.training.jobs.drafter_options import DrafterOptions
from specjax.training.lock import alone
from specjax.training.loop import fit
from specjax.training.losses import chunked_with_rows
from specjax.training.material import Material, gather, held_out_prompts, learned, mixed, rows_of
from specjax.training.measure import measure_tau
from specjax.training.mesh import lay_batch, mesh_of_run
from specjax.training.objectives import OBJECTIVES, binary_cross_entropy, mean_of, per_row
from specjax.training.online import begin, roll_out, row_keys
from specjax.training.ordering import Row, Rows
from specjax.training.record import named
from specjax.training.recorded import STATES, Recorded
from specjax.training.recordings import open_teacher, share_of_answers, target_of
from specjax.training.sources import sample, share_of_target
from specjax.training.targets import fitted, load_target, reader
from specjax.training.written import Written
from specjax.types import Params


def initial_params(
    options: DrafterOptions, target: LanguageModel, mine: Learner, to_draft: np.ndarray | None
) -> Arrays:
    """Returns the parameters of the folder `--initial` in float32.

    Args:
      options: of the run.
      target: the model that it is trained for.
      mine: the drafter that the options describe.
      to_draft: [V] the drafter's id of each token, or -1; None if it knows all tokens.

    Raises:
      ValueError: the folder holds a drafter of another kind, shape or vocabulary.
    """
    folder = options.initial
    assert folder is not None
    loaded = load_drafter(folder, target, rules=TRAINING_RULES)
    if not isinstance(loaded, PublishedDrafter) or type(loaded.source) is not type(mine.source):
        raise ValueError(
            f"--initial {folder} is not a drafter of --kind {options.kind}: pass another "
            "folder, or its kind"
        )
    faults = _differences(loaded.source, mine.source)
    if faults:
        raise ValueError(
            f"--initial {folder} has another shape than these options describe:\n  "
            + "\n  ".join(faults)
        )
    if ("head" in loaded.shares) == mine.own_head:
        raise ValueError(
            f"--initial {folder} has "
            + ("no output matrix" if mine.own_head else "an output matrix")
            + " of its own: pass --"
            + ("no-" if mine.own_head else "")
            + "own-head"
        )
    own = dict(loaded.params)
    theirs = own.pop("to_draft", None)
    if (theirs is None) != (to_draft is None) or not np.array_equal(
        np.arange(0) if theirs is None else theirs,
        np.arange(0) if to_draft is None else to_draft,
    ):
        size = "all tokens" if theirs is None else f"{(np.asarray(theirs) >= 0).sum()} tokens"
        raise ValueError(
            f"--initial {folder} knows {size}, and --draft-vocab-size "
            f"{options.draft_vocab_size} of this --data are others: pass the number and "
            "the data that it was trained with"
        )
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), own)


def _differences(theirs: object, mine: object, name: str = "") -> list[str]:
    """Returns a line for each field in which two configurations differ."""
    if type(theirs) is type(mine) and dataclasses.is_dataclass(mine):
        return [
            line
            for field in dataclasses.fields(mine)
            if field.compare
            for line in _differences(
                vars(theirs)[field.name], vars(mine)[field.name], f"{name}.{field.name}"
            )
        ]
    return [] if theirs == mine else [f"{name[1:]}: {theirs} in the folder, {mine} by the options"]


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
        made = self.batches[step]
        if self.features is not None:
            made["states"] = self.features.of(made["tokens"][:, :-1])
        return made

    @functools.cached_property
    def batches(self) -> Rows:
        """Returns the rows of each step."""
        o = self.options
        share = 0.0 if o.online else o.sampled_fraction or 0.0
        return mixed(
            self.material.text, self.written, o.sequence_length, o.batch_size, o.seed, share
        )

    def held_out(self, first: int, rows: int) -> dict[str, np.ndarray]:
        """Returns held-out rows like those of a batch, beginning with row `first`."""
        held_out = rows_of(self.material.held_out, self.options.sequence_length, 0)
        return held_out.batch(rows)[first // rows]

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


@dataclasses.dataclass(eq=False)
class RecordedDrafter(TrainDrafter):
    """Trains a drafter with the recorded hidden states of its target."""

    teacher: Recorded = dataclasses.field(kw_only=True)

    @functools.cached_property
    def batches(self) -> Rows:
        o = self.options
        return self.teacher.batches(o.batch_size, o.sampled_fraction or 0.0, o.seed)

    def held_out(self, first: int, rows: int) -> Row:
        return self.teacher.held_out(first, rows)


FRONT_DOORS = {"model": distill.main, "medusa": medusa.main}
"""Kinds that have a job of their own."""


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    other = [kind for kind in FRONT_DOORS if arguments[:2] == ["--kind", kind]]
    if other:
        FRONT_DOORS[other[0]](arguments[2:])
        return
    options = parse(DrafterOptions, argv, __doc__)
    with alone(options.out, writes=not options.show_mask):
        job = make_job(options)
        fit(job, job.options)


def make_job(options: DrafterOptions) -> TrainDrafter:
    """Loads and reads what the options name, for `fit` or for a loop of one's own.

    Returns:
      The job; `job.options` has the defaults filled in.

    Raises:
      ValueError: options, models and data do not fit together.
    """
    options.check_source()
    if options.keep_features and jax.process_count() > 1:
        raise ValueError("--keep-features works in a single process: leave it out")
    mesh = mesh_of_run(options)
    job = _recorded(options, mesh) if options.teacher else _beside_target(options, mesh)
    counts = {
        "target": job.target.num_params,
        "drafter": sum(x.size for x in jax.tree.leaves(jax.eval_shape(job.fresh))),
    }
    print(f"parameters: {json.dumps(counts)}; taps {job.learner.source.taps}", flush=True)
    if job.features is not None:
        print(job.features, flush=True)
    return job


def _beside_target(options: DrafterOptions, mesh: Mesh | None) -> TrainDrafter:
    """Returns a job whose target is in memory."""
    target = load_target(options, options.dtype, mesh)
    options = fitted(options, target)
    material = gather(options, target, options.settings)
    if options.online and material.text is None:
        raise ValueError(
            "--data holds only sequences of prompts and answers, and --online continues windows of "
            "text: add a folder of text"
        )
    default = 0.0 if options.online or material.written is None else 0.5
    share = share_of_target(options.sampled_fraction, default, material)
    config, known = target.model.module.config, None
    learner = plan(options.kind, options, config, mask_token(target, options.mask_token))
    if options.draft_vocab_size:
        counts = token_counts(material, config.vocab_size)
        known = draft_vocabulary(counts, options.draft_vocab_size, target.eos)
    written = material.written
    if share and written is None and material.text is not None:
        hashes = model_hashes(options.target, options.lora)
        folder = pathlib.Path(options.out) / "sampled"
        sample(target, material.text, options, folder, hashes)
        rows = dataset.read_masked(folder, hashes)
        written = Written.of(rows, options.sequence_length)
    share = 1.0 if material.text is None else share
    options = dataclasses.replace(options, sampled_fraction=share)
    return TrainDrafter(options, target, learner, material, written, known, mesh)


def _recorded(options: DrafterOptions, mesh: Mesh | None) -> TrainDrafter:
    """Returns a job that learns from a recording."""
    teacher = open_teacher(options, options.isolate_documents, (STATES,), options.dtype)
    share = share_of_answers(options.sampled_fraction, teacher)
    options = dataclasses.replace(options, sampled_fraction=share)
    target = target_of(teacher, options, mesh, whole=bool(options.eval_prompts))
    config, known = target.model.module.config, None
    learner = plan(options.kind, options, config, mask_token(target, options.mask_token))
    teacher = teacher.tapping(learner.source.taps)
    if options.draft_vocab_size:
        counts = teacher.token_counts()
        known = draft_vocabulary(counts, options.draft_vocab_size, target.eos)
    inputs = {**teacher.request.hashes, "teacher": teacher.hash}
    material = Material(None, None, teacher.held_out_rows(), inputs)
    return RecordedDrafter(
        options, target, learner, material, None, known, mesh, teacher=teacher
    )  # fmt: skip


if __name__ == "__main__":
    run(main)
