"""specjax train distill: train a small draft to predict what the target would write.

The draft learns from windows of text, from text that the target wrote, from text that it writes
itself, or inside speculation (--online).  Text that the models wrote matches where a draft is used;
plain text keeps the data varied.  With --teacher it learns from what train.teacher has recorded,
and no target is needed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
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
from specjax.options.command import parse, run
from specjax.parallel import row_parts, to_host
from specjax.proposers import NoProposer
from specjax.rules import Match
from specjax.sampling import Sampling
from specjax.training import accepted, dataset, online
from specjax.training.corpus import Tokens, starts_of_documents
from specjax.training.dataset import initial_hash, model_hashes
from specjax.training.divergences import DIVERGENCES, blend
from specjax.training.jobs.distill_options import (
    ACCEPTED_LENGTH,
    AUTO,
    DistillOptions,
    annealing,
)
from specjax.training.lock import alone
from specjax.training.loop import fit
from specjax.training.losses import (
    Teacher,
    against,
    against_recorded,
    agreement,
    chunked,
    chunked_rows,
    log_draft,
    log_target,
    recorded_agreement,
    with_cap,
)
from specjax.training.material import gather, held_out_prompts, learned, mixed, rows_of
from specjax.training.measure import measure_tau
from specjax.training.mesh import lay_batch, mesh_of_run
from specjax.training.mixture import Mixture
from specjax.training.ordering import Rows
from specjax.training.record import named
from specjax.training.recorded import CANDIDATES, Recorded
from specjax.training.recordings import open_teacher, share_of_answers, target_of
from specjax.training.sources import sample, share_of_target, with_starts
from specjax.training.student import (
    check_initial,
    initial_params,
    make_model,
    no_wider,
    read,
    save_student,
)
from specjax.training.targets import fitted, load_target, reader
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
        o, batch = self.options, self.batches[step]
        share = min(1.0, step / o.anneal_steps) if o.anneal_steps else 1.0
        return {**batch, "share": np.full(o.batch_size, share, np.float32)}

    @functools.cached_property
    def batches(self) -> Rows:
        """Returns the rows of each step."""
        o = self.options
        if o.online:  # all texts are windows, which both models continue in the step
            return mixed(self.text, None, o.sequence_length, o.batch_size, o.seed, 0.0)
        return mixed(
            self.text, self.written, o.sequence_length, o.batch_size, o.seed,
            o.sampled_fraction or 0.0, o.draft_fraction, o.mix == "batch",
        )  # fmt: skip

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
        held_out, means = rows_of(self.held_out, o.sequence_length, 0).batch(ROWS), []
        for i in range(o.eval_batches):
            rows = held_out[i]
            batch = (rows["tokens"], rows["drawn"], np.ones(ROWS, np.float32))
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


@dataclasses.dataclass(eq=False)
class DistillRecorded(Distill):
    """Trains a draft by a divergence from the log-probabilities of a recording."""

    teacher: Recorded = dataclasses.field(kw_only=True)

    @property
    def frozen(self) -> Arrays:
        return {}

    @functools.cached_property
    def batches(self) -> Rows:
        o = self.options
        share, whole = o.sampled_fraction or 0.0, o.mix == "batch"
        return self.teacher.batches(o.batch_size, share, o.seed, whole).map(
            lambda rows: {**rows, **{name: rows[name][:, :, : o.top] for name in CANDIDATES}}
        )

    def loss(self, params: Arrays, frozen: Arrays, batch: Batch) -> tuple[Array, dict[str, Array]]:
        o = self.options
        weight = learned(batch["drawn"], o.learn_prompts).reshape(-1)
        hidden = read(self.draft, params, batch["tokens"][:, :-1], self.end)
        total = chunked(with_cap(against_recorded(DIVERGENCES[o.loss]), self.cap))(
            hidden, head_matrix(params), (weight, *_flat(batch)), (self.serving, self._share(batch))
        )
        return total / weight.sum().clip(1), {"weight": weight.sum()}

    @functools.cached_property
    def _bounds(self) -> Callable[..., Array]:
        def mean(params: Arrays, batch: Batch) -> Array:
            weight = learned(batch["drawn"], self.options.learn_prompts) * batch["counted"][:, None]
            hidden = read(self.draft, params, batch["tokens"][:, :-1], self.end)
            values = chunked_rows(with_cap(recorded_agreement, self.cap))(
                hidden, head_matrix(params), _flat(batch), (self.serving,)
            )
            return (weight.reshape(-1, 1) * values).sum(0) / weight.sum()

        return jax.jit(mean)

    def evaluate(self, params: Arrays) -> dict[str, float]:
        means = []
        for index in range(self.options.eval_batches):
            batch = self.teacher.held_out(index * ROWS, ROWS)
            batch["counted"] = np.ones(ROWS, np.float32)
            # Padding rows have weight 0, so every mesh measures the same text.
            batch = lay_batch(filled(batch, row_parts(self.mesh)), self.mesh)
            means.append(to_host(self._bounds(params, batch)))
        names = ("kl_at_least", "alpha_at_least", "alpha_at_most", "same_argmax")
        values = np.mean(means, axis=0).tolist()
        report = {f"held_out_{name}": value for name, value in zip(names, values, strict=True)}
        return report | self._tau(params)

    def goal(self, report: dict[str, float]) -> float:
        return report.get("tau", -report["held_out_kl_at_least"])


def _flat(batch: Batch) -> tuple[Array, Array]:
    """Returns the recorded ids and log-probabilities [B * T, k]."""
    ids, log_probs = batch["top_ids"], batch["top_log_probs"]
    return ids.reshape(-1, ids.shape[-1]), log_probs.reshape(-1, ids.shape[-1])


def taught(
    options: DistillOptions, mesh: Mesh | None
) -> tuple[DistillOptions, LanguageModel, Recorded]:
    """Returns the recording that a run learns from.

    Returns:
      The options, some of which are taken from the recording; the target, which has parameters only
      if tau is measured with it; and the recording.

    Raises:
      ValueError: the recording is damaged or not complete, another target made it, or it was made
        for other options.
    """
    teacher = open_teacher(
        options, options.isolate_documents, dtype=options.dtype, settings=options.settings
    )
    request = teacher.request
    if options.top > request.top:
        raise ValueError(
            f"--top is {options.top}; --teacher {options.teacher} has {request.top} "
            "log-probabilities of each token: pass no more, or record it again"
        )
    options = dataclasses.replace(
        options,
        top=options.top or request.top,
        sampled_fraction=share_of_answers(options.sampled_fraction, teacher),
    )
    whole = bool(options.eval_prompts) or options.loss == AUTO
    return options, target_of(teacher, options, mesh, whole), teacher


def main(argv: list[str] | None = None) -> None:
    options = parse(DistillOptions, argv, __doc__)
    with alone(options.out, writes=not options.show_mask):
        distill(options)


def distill(options: DistillOptions) -> None:
    """Runs the job in a folder that the caller holds."""
    job = make_job(options)
    if options.loss == AUTO:
        if options.show_mask:
            raise ValueError("--show-mask shows the batches of one loss: name it, not --loss auto")
        from specjax.training.jobs.calibration import calibrated

        job = calibrated(job)
    if job.options.anneal_steps:
        print(
            f"the loss changes from forward KL to --loss {job.options.loss} in the first "
            f"{job.options.anneal_steps} steps (--anneal-steps)",
            flush=True,
        )
    fit(job, job.options)


def make_job(options: DistillOptions) -> Distill:
    """Loads and reads the models and data that the options name.

    Returns:
      The job, for `fit` or for a loop of one's own; `job.options` has the defaults filled in.

    Raises:
      ValueError: options, models and data do not fit together.
    """
    options.check_source()
    if options.loss != AUTO:
        options = dataclasses.replace(options, anneal_steps=annealing(options))
    mesh = mesh_of_run(options)
    return _recorded(options, mesh) if options.teacher else _beside_target(options, mesh)


def _beside_target(options: DistillOptions, mesh: Mesh | None) -> Distill:
    """Returns a job whose target is in memory."""
    out = pathlib.Path(options.out)
    target = load_target(options, options.dtype, mesh)
    options = no_wider(fitted(options, target), target.model.module.config)
    _check_start(options, target)
    material = gather(options, target, options.settings, options.loss == ACCEPTED_LENGTH)
    text, written = material.text, material.written
    share = share_of_target(options.sampled_fraction, options.share_beside_text, material)
    options = dataclasses.replace(options, sampled_fraction=share)
    needs_text = options.online or share < 1
    if needs_text and text is None:
        cure = "" if options.online else ", or pass --sampled-fraction 1"
        raise ValueError(
            "--data holds only sequences of prompts and answers"
            + ", and --online continues windows of text" * options.online
            + f": add a folder of text{cure}"
        )
    samples = bool(share) and not options.online
    if written is None and text is not None and samples:
        hashes = model_hashes(options.target, options.lora)
        sample(target, text, options, out / "sampled", hashes)
        rows = dataset.read_masked(out / "sampled", hashes)
        written = Written.of(rows, options.sequence_length)
    if written is not None and options.loss == ACCEPTED_LENGTH:
        written = with_starts(written, options.num_drafts)
    if options.pack:
        if written is None:
            raise ValueError("--pack: there are no sequences with answers to pack; leave it out")
        written = written.packed()
    draft = make_model(options, target.model.vocab_size, target.model.max_positions)
    trained = None
    if options.early_exit is not None:
        from specjax.training.early_exit import exit_of

        draft, trained = exit_of(draft, target, options.early_exit)
    assert target.tokenizer is not None  # `gather` has checked it
    end = starts_of_documents(target.tokenizer, options.isolate_documents)
    inputs = {**material.inputs, **_start_hash(options)}
    job = Distill(
        options, draft, target, text, material.held_out, written, end, inputs, mesh, trained
    )
    return _with_models(job, options.target)


def _recorded(options: DistillOptions, mesh: Mesh | None) -> Distill:
    """Returns a job that learns from a recording."""
    options, target, teacher = taught(options, mesh)
    options = no_wider(options, target.model.module.config)
    _check_start(options, target)
    draft = make_model(options, target.model.vocab_size, target.model.max_positions)
    assert target.tokenizer is not None  # `taught` has checked it
    end = starts_of_documents(target.tokenizer, options.isolate_documents)
    inputs = {**teacher.request.hashes, "teacher": teacher.hash, **_start_hash(options)}
    rows = teacher.held_out_rows()
    job = DistillRecorded(
        options, draft, target, None, rows, None, end, inputs, mesh, teacher=teacher
    )
    return _with_models(job, options.teacher or "")


def _check_start(options: DistillOptions, target: LanguageModel) -> None:
    """Checks the tokens of a model that the draft starts from."""
    start = options.start
    # The target's own layers have its tokens, also if a LoRA brings a tokenizer.
    foreign = None if start is None or start.folder == options.target else start
    check_initial(
        foreign, target.tokenizer, target.model.vocab_size, f"--target {options.words}",
        "a draft must share the target's tokens: pass one that was trained for this target",
        "--teacher" if options.teacher else "--draft-fraction" if options.draft_fraction else "",
    )  # fmt: skip


def _start_hash(options: DistillOptions) -> dict[str, str]:
    start = options.start
    return initial_hash(start.folder if start is not None and start.has_weights else None)


def _with_models(job: Distill, teacher: str) -> Distill:
    """Returns the job with its models in `run.json`; their sizes are printed."""
    shapes, start = jax.eval_shape(job.draft.init, jax.random.key(0)), job.options.start
    models = {
        "target": named(teacher, job.target.model.module.config, job.target.num_params),
        "draft": named(start and start.folder, job.draft.module.config, shapes),
    }
    sizes = {"target": job.target.num_params, "draft": models["draft"]["parameters"]}
    if job.trained:
        sizes["trained"] = _count({name: shapes[name] for name in job.trained})
    sizes = {name: size for name, size in sizes.items() if size}
    print(f"parameters: {json.dumps(sizes)}", flush=True)
    return job.with_options(job.options, {"models": models})


def _count(shapes: Arrays) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


if __name__ == "__main__":
    run(main)
