"""specjax train distill: train a small draft to predict what the target would write.

The draft learns from windows of text, from text that the target wrote, from text that it writes
itself, or inside speculation (--online).  Text that the models wrote matches where a draft is used;
plain text keeps the data varied.  With --teacher it learns from what train.teacher has recorded,
and no target is needed.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import contract, decoding, methods, rules
from specjax._internal.checks import settle
from specjax.files import TOKENIZER
from specjax.models import LanguageModel, LinenModel, head_matrix
from specjax.options.command import parse
from specjax.options.fields import count, option
from specjax.parallel import row_parts, to_host
from specjax.training import accepted, losses, online, student
from specjax.training.checkpoints import saved_steps
from specjax.training.corpus import starts_of_documents
from specjax.training.divergences import DIVERGENCES, blend
from specjax.training.jobs.taught import TaughtJob
from specjax.training.lock import alone
from specjax.training.loop import fit
from specjax.training.losses import Operands, Teacher, chunked, chunked_rows, with_cap
from specjax.training.material import Material, learned
from specjax.training.mesh import lay_batch
from specjax.training.ordering import Rows
from specjax.training.record import RUN, named, num_params, read_run
from specjax.training.recorded import CANDIDATES, Recorded
from specjax.training.recordings import RecordedMaterial, opened, share_of_answers
from specjax.training.sources import SampledOptions, sampled, with_starts
from specjax.training.student import SIZES, ModelOptions, Start, read
from specjax.training.targets import ServingOptions, reader
from specjax.training.top import folded, top_of
from specjax.training.trees import Batch, Row, Tree
from specjax.types import ArrayTree, DecodeState, Json, Params

ROWS = 4
"""Rows of a held-out batch."""

ACCEPTED_LENGTH = "accepted-length"
AUTO = "auto"
_FLAT = ("total-variation", ACCEPTED_LENGTH)
"""Losses whose gradient nearly vanishes where draft and target share little probability."""


@dataclasses.dataclass(frozen=True)
class DistillOptions(ModelOptions, ServingOptions, SampledOptions):
    """The target, the data, the draft's sizes, and the loop."""

    group = "distillation"
    common = (
        "target", "dtype", "data", "teacher", "hidden_size", "num_layers", "num_heads",
        "initial", "like", "mesh", "steps", "batch_size", "learning_rate", "optimizer",
        "out", "sequence_length", "seed", "eval_every", "save_every", "curves", "loss",
        "num_drafts", "temperature", "top_k", "top_p", "sampled_fraction",
        "draft_fraction", "online", "sampled_sequences", "eval_prompts",
    )  # fmt: skip

    loss: str = option(
        "forward-kl",
        "training loss; auto: a short training with each of --auto-losses, and the one with the "
        "best tau",
        choices=(*DIVERGENCES, ACCEPTED_LENGTH, AUTO),
    )
    auto_losses: tuple[str, ...] = option(
        ("forward-kl", "jensen-shannon", "total-variation", "log-acceptance", "adaptive"),
        "losses that --loss auto compares",
        choices=tuple(DIVERGENCES),
    )
    auto_steps: int = count(0, "steps with each of them; 0: a twentieth of --steps, at least 20", 0)
    auto_prompts: int = count(32, "held-out prompts on which their tau is measured")
    top: int = count(
        0,
        "let only so many of the target's likeliest tokens count one by one, and all others as "
        "one; 0: all of them, or as many as --teacher has",
        0,
    )
    anneal_steps: int | None = count(
        None,
        "steps over which the loss changes linearly from forward KL to --loss; 0: none; by default "
        "4/5 of --steps for total-variation and accepted-length without --initial, else none",
        0,
    )
    num_drafts: int = count(
        4, "draft tokens per step (gamma), for accepted-length, --online and --eval-prompts"
    )
    draft_fraction: float = option(
        0.0, "fraction of the sequences that the draft writes during the training step", "[0, 1]"
    )
    pack: bool = option(
        False,
        "put several short sequences with answers into one row; they do not attend to each other",
    )
    learn_prompts: bool = option(False, "also learn the prompts of sequences with answers")
    mix: str = option(
        "sequence",
        "whether every batch mixes the sources, or each batch has a single source",
        choices=("sequence", "batch"),
    )
    eval_batches: int = count(32, "held-out batches per evaluation")
    like: str | None = option(
        None,
        "target, or the folder of a model whose family, positions and sizes a student with random "
        "weights has",
    )
    from_layers: tuple[int, ...] = option(
        (),
        "start from these layers of --like (default: the target), with its embedding, final norm "
        "and output matrix",
    )
    early_exit: int | None = count(
        None,
        "the draft is the first so many layers of the target with its output matrix, which all "
        "stay; a final norm for the exit is trained",
    )

    new_sizes: ClassVar[Mapping[str, int]] = dict(zip(SIZES, (128, 352, 1, 2, 1), strict=True))

    def __post_init__(self):
        super().__post_init__()
        share, exits = self.sampled_fraction or 0.0, self.early_exit is not None
        exact, continues = self.loss == ACCEPTED_LENGTH, self.teacher is None or self.measures_tau
        filters = self.temperature == 0 or self.top_k or self.top_p < 1
        for loss in self.auto_losses if self.loss == AUTO else ():
            dataclasses.replace(self, loss=loss)  # raises ValueError where this loss cannot be
        asks = {
            "--online": self.online,
            "--draft-fraction": self.draft_fraction,
            "--early-exit": exits,
            f"--loss {ACCEPTED_LENGTH}": exact,
            "--pack": self.pack,
        }
        self.check_teacher(asks, {f"--loss {AUTO}": self.loss == AUTO})
        settle(
            (
                exits and self.dtype == "int8",
                "--early-exit writes the target's layers into a folder, which --dtype int8 has "
                "rounded: pass float32 or bfloat16",
            ),
            (
                continues and self.sampled_prompt >= self.sequence_length,
                f"--sampled-prompt is {self.sampled_prompt}; it must be shorter than a sequence "
                f"(--sequence-length {self.sequence_length})",
            ),
            (
                share + self.draft_fraction > 1,
                f"--sampled-fraction {share} and --draft-fraction {self.draft_fraction} add up to "
                "more than 1",
            ),
            (
                self.loss == "reverse-kl" and filters,
                "--loss reverse-kl is infinite where the target gives a token no probability "
                "(--temperature 0, --top-k, --top-p): take jensen-shannon or total-variation",
            ),
            (
                exact
                and (self.online or self.draft_fraction or self.sampled_fraction not in (None, 1)),
                "--loss accepted-length is a mean over text that the target wrote: pass "
                "--sampled-fraction 1, and neither --online nor --draft-fraction",
            ),
            (
                exact and self.top,
                "--loss accepted-length reads every token's probability: no --top",
            ),
            (
                exact and self.pack,
                "--loss accepted-length needs to know where each sequence was cut: no --pack",
            ),
            (
                self.num_drafts > self.sequence_length or (self.online and not self.online_steps),
                f"--sequence-length {self.sequence_length} has no room for --num-drafts "
                f"{self.num_drafts}"
                + f" after --sampled-prompt {self.sampled_prompt}"
                * self.online,
            ),
            (
                self.teacher and self.from_layers and self.like is None and not self.target,
                "--from-layers takes weights of the target: pass --target, too, or --like FOLDER",
            ),
        )

    @property
    def sources(self) -> dict[str, object]:
        given = {**super().sources, "early_exit": self.early_exit}
        return {name: value for name, value in given.items() if value}

    @property
    def auto(self) -> int:
        """The steps with each loss that `--loss auto` compares."""
        return self.auto_steps or min(self.steps, max(20, self.steps // 20))

    @property
    def model_like(self) -> str | None:
        by_default = self.like is None and self.from_layers
        return self.words if by_default or self.like == "target" else self.like

    @property
    def start(self) -> Start | None:
        if self.early_exit is None:
            start = super().start
            if start is not None and self.from_layers and start.folder == self.target:
                start = dataclasses.replace(start, lora=self.lora)
            return start
        layers = tuple(range(self.early_exit))
        name = f"--early-exit {self.early_exit}"
        return Start(self.target, name, layers=layers, lora=self.lora)

    @property
    def measures_tau(self) -> bool:
        return bool(self.eval_prompts) or self.loss == AUTO

    def share_beside_text(self, has_answers: bool) -> float:
        return 1.0 if self.loss == ACCEPTED_LENGTH else min(0.5, 1 - self.draft_fraction)

    @property
    def online_steps(self) -> int:
        """The steps of speculation that fit into a sequence even if every draft is accepted."""
        return (self.sequence_length - self.sampled_prompt) // (self.num_drafts + 1)


def annealing(options: DistillOptions) -> int:
    """Returns `--anneal-steps`, or its default.

    A resumed run keeps the number that it began with.  A new run without `--initial` anneals for
    4/5 of its steps if its loss needs it, because a random draft shares little with the target.

    Raises:
      ValueError: the `run.json` of a resumed run cannot be read.
    """
    if options.anneal_steps is not None:
        return options.anneal_steps
    out = pathlib.Path(options.out)
    if saved_steps(out) and (run := read_run(out / RUN, options.accept_changes)) is not None:
        return run["options"].get("anneal_steps") or 0
    return options.steps * 4 // 5 if options.loss in _FLAT and options.initial is None else 0


@dataclasses.dataclass(eq=False)
class Distill(TaughtJob[DistillOptions]):
    """Trains a draft by a divergence from a frozen target, or by the expected accepted length."""

    draft: LinenModel
    end: int | None = None  # the token that starts a document, if documents are isolated; else None
    trained: tuple[str, ...] | None = None  # which of the draft's parameters; None: all
    more: Mapping[str, Json] = dataclasses.field(default_factory=dict)  # for `run.json`

    def __post_init__(self):
        self.serving = self.options.serving
        self.reader = reader(self.target)
        self.cap = self.draft.module.config.logit_softcap
        # Equal tokenizers may be padded to other sizes; ids beyond the smaller one are not tokens.
        own, theirs = self.draft.vocab_size, self.target.model.vocab_size
        self.size = None if own == theirs else min(own, theirs)
        # Of an early exit the other parameters are the target's.
        names = jax.eval_shape(self.draft.init, jax.random.key(0)) if self.trained else ()
        self.shared = tuple(name for name in names if name not in (self.trained or ()))

    def with_loss(self, loss: str, facts: Mapping[str, Json], **changes: Any) -> Distill:
        """Returns the same job with another loss and options, and more for its `run.json`."""
        options = dataclasses.replace(self.options, loss=loss, **changes)
        options = dataclasses.replace(options, anneal_steps=annealing(options))
        return dataclasses.replace(self, options=options, more={**self.more, **facts})

    @property
    def initial(self) -> str | None:
        start = self.options.start
        return start.folder if start is not None and start.has_weights else None

    @property
    def models(self) -> dict[str, dict[str, Json]]:
        start, shapes = self.options.start, jax.eval_shape(self.draft.init, jax.random.key(0))
        draft = named(start and start.folder, self.draft.module.config, shapes)
        return {**super().models, "draft": draft}

    @property
    def facts(self) -> dict[str, Json]:
        return {**super().facts, **self.more}

    def init(self) -> Tree:
        if self.trained is None:
            return student.initial_params(self.draft, self.options, self.mesh)
        return {
            name: jax.tree.map(lambda leaf: jnp.copy(leaf.astype(jnp.float32)), self.frozen[name])
            for name in self.trained
        }

    def whole(self, params: Tree, frozen: Tree) -> Tree:
        """Returns all parameters of the draft: the trained ones, and the target's."""
        return {**{name: frozen[name] for name in self.shared}, **params}

    def batch(self, step: int) -> Row:
        o, batch = self.options, self.batches[step]
        share = min(1.0, step / o.anneal_steps) if o.anneal_steps else 1.0
        return {**batch, "share": np.full(o.batch_size, share, np.float32)}

    @functools.cached_property
    def batches(self) -> Rows:
        """Returns the rows of each step."""
        o = self.options
        share = 0.0 if o.online else o.sampled_fraction or 0.0  # online both models continue text
        own = 0.0 if o.online else o.draft_fraction
        whole = o.mix == "batch" and not o.online
        return self.material.batches(o.sequence_length, o.batch_size, o.seed, share, own, whole)

    def loss(self, params: Tree, frozen: Tree, batch: Batch) -> tuple[Array, dict[str, Array]]:
        o, params = self.options, self.whole(params, frozen)
        if o.online:
            return self._online(params, frozen, batch)
        tokens = self._continue(params, batch) if o.draft_fraction else batch["tokens"]
        if o.loss == ACCEPTED_LENGTH:
            return self._accepted_length(params, frozen, batch, tokens)
        weight = learned(batch["drawn"], o.learn_prompts).reshape(-1)
        hidden, rows, shared = self._inputs(params, frozen, batch, tokens)
        total = chunked(with_cap(self.divergence, self.cap, self.size))(
            hidden, head_matrix(params), (weight, *rows), (*shared, self._share(batch))
        )
        return total / jnp.maximum(weight.sum(), 1), {"weight": weight.sum()}

    @property
    def divergence(self) -> Callable[..., Array]:
        """The loss for `chunked`, whose rows and shared arrays are those of `_inputs`."""
        return losses.against(DIVERGENCES[self.options.loss], self.options.top)

    def _inputs(
        self, params: Tree, frozen: Tree, batch: Batch, tokens: Array
    ) -> tuple[Array, Operands, Operands]:
        """Returns hidden states [B * T, E] of the draft, the target's rows, and what all share."""
        inputs, starts = tokens[:, :-1], batch.get("starts")
        target = read(self.reader, frozen, inputs, self.end, starts)
        hidden = read(self.draft, params, inputs, self.end, starts)
        cap = self.target.model.module.config.logit_softcap
        teacher = Teacher(head_matrix(frozen), cap, self.size)
        return hidden, (jax.lax.stop_gradient(target),), (teacher, self.serving)

    def _accepted_length(
        self, params: Tree, frozen: Tree, batch: Batch, tokens: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Returns 1 - E[N] / gamma, blended with forward KL while it is annealed."""
        o = self.options
        labels = tokens[:, 1:].reshape(-1)
        kl, ratio, alpha = self._rows(params, frozen, batch, tokens, labels)
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

    def _share(self, batch: Batch) -> Array | None:
        """Returns the weight of `--loss` against forward KL; None where nothing is annealed."""
        return batch["share"][0] if self.options.anneal_steps else None

    def _rows(
        self, params: Tree, frozen: Tree, batch: Batch, tokens: Array, *labels: Array
    ) -> Array:
        """Returns statistics [S, B, T] of each token; with the next tokens, those of a chain."""
        statistics = accepted.statistics if labels else self.agreement
        hidden, rows, shared = self._inputs(params, frozen, batch, tokens)
        values = chunked_rows(with_cap(statistics, self.cap, self.size))(
            hidden, head_matrix(params), (*labels, *rows), shared
        )
        return jnp.moveaxis(values.reshape(len(tokens), -1, values.shape[-1]), -1, 0)

    def _prefill(self, decoder: decoding.Decoder, params: Params, batch: Batch) -> DecodeState:
        o, keys = self.options, online.row_keys(self.options.seed, batch["number"])
        return online.begin(decoder, params, batch["tokens"], o.sampled_prompt, o.settings, keys)

    def _continue(self, params: Tree, batch: Batch) -> Array:
        """Returns the tokens of a batch; the draft as it is now generates its `own` rows."""
        from specjax.proposers import NoProposer

        tokens, own = batch["tokens"], batch["own"]
        decoder = decoding.Decoder(self.draft, NoProposer(), rules.Match(), (), tokens.shape[1])
        arrays = Params(jax.lax.stop_gradient(params))

        def write() -> Array:
            written = decoder.run(arrays, self._prefill(decoder, arrays, batch)).tokens
            return jnp.where(own[:, None], written[:, : tokens.shape[1]], tokens)

        return jax.lax.cond(own.any(), write, lambda: tokens)

    @property
    def proposer(self) -> contract.Proposer[ArrayTree, ArrayTree]:
        """The draft as it is being trained."""
        return methods.DraftModel(self.draft, self.target.model.vocab_size, self.options.num_drafts)

    def _online(self, params: Tree, frozen: Tree, batch: Batch) -> tuple[Array, dict[str, Array]]:
        o = self.options
        decoder = decoding.Decoder(
            self.target.model, self.proposer, rules.Match(), (), o.sequence_length
        )
        arrays = Params(frozen, jax.lax.stop_gradient(params))
        rollout = online.roll_out(
            decoder, arrays, self._prefill(decoder, arrays, batch), o.online_steps
        )
        hidden = online.read_branches(self.draft, params, rollout)

        def loss(logits: Array, weight: Array, target: Array, share: Array | None) -> Array:
            theirs, mine = losses.log_target(target), losses.log_draft(logits, self.serving)
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

    measures = ("kl", "alpha", "same_argmax")
    agreement = staticmethod(losses.agreement)

    @functools.cached_property
    def _measure(self) -> Callable[[Tree, Tree, Batch], Array]:
        def mean(params: Tree, frozen: Tree, batch: Batch) -> Array:
            weight = learned(batch["drawn"], self.options.learn_prompts) * batch["counted"][:, None]
            values = self._rows(params, frozen, batch, batch["tokens"])
            return (weight * values).sum((1, 2)) / weight.sum()

        return jax.jit(mean)

    def evaluate(self, params: Tree) -> dict[str, float]:
        params = self.whole(params, self.frozen)
        report = {f"held_out_{name}": value for name, value in self.held_out(params).items()}
        arrays = Params(self.target.params, params)
        return report | self.tau(self.proposer, arrays, self.options.settings)

    def held_out(self, params: Tree) -> dict[str, float]:
        """Returns means over held-out batches."""
        rows, means = self.material.test(self.options.sequence_length, ROWS), []
        for index in range(self.options.eval_batches):
            batch = {**rows[index], "counted": np.ones(ROWS, np.float32)}
            # Padding rows have weight 0, so every mesh measures the same text.
            batch = lay_batch(filled(batch, row_parts(self.mesh)), self.mesh)
            means.append(to_host(self._measure(params, self.frozen, batch)))
        return dict(zip(self.measures, np.mean(means, axis=0).tolist(), strict=True))

    def goal(self, report: dict[str, float]) -> float:
        """Returns tau where it is measured (it can fall while the loss improves); else -KL."""
        return report.get("tau", -report[f"held_out_{self.measures[0]}"])

    def export(self, params: Tree, folder: pathlib.Path) -> None:
        # The target's EOS tokens may differ from the corpora's, and there may be several.
        files = {} if self.options.initial else self.target.files
        student.save_student(
            folder,
            self.draft,
            self.whole(params, self.frozen),
            self.tokenizer,
            self.target.eos,
            {name: files[name] for name in TOKENIZER if name in files},
            self.options.start,
        )


def filled(rows: Row, parts: int) -> Row:
    """Returns rows padded with rows of zeros until `parts` divides their number."""
    return {
        name: np.pad(x, ((0, -len(x) % parts), *((0, 0),) * (x.ndim - 1)))
        for name, x in rows.items()
    }


@dataclasses.dataclass(eq=False)
class DistillRecorded(Distill):
    """Trains a draft by a divergence from the log-probabilities of a recording."""

    measures = ("kl_at_least", "alpha_at_least", "alpha_at_most", "same_argmax")
    agreement = staticmethod(losses.recorded_agreement)

    @property
    def frozen(self) -> Tree:
        return {}

    @functools.cached_property
    def batches(self) -> Rows:
        top = self.options.top
        return super().batches.map(
            lambda rows: {**rows, **{name: rows[name][:, :, :top] for name in CANDIDATES}}
        )

    @property
    def divergence(self) -> Callable[..., Array]:
        return losses.against_recorded(DIVERGENCES[self.options.loss])

    def _inputs(
        self, params: Tree, frozen: Tree, batch: Batch, tokens: Array
    ) -> tuple[Array, Operands, Operands]:
        said = (batch[name].reshape(-1, batch[name].shape[-1]) for name in CANDIDATES)
        return read(self.draft, params, tokens[:, :-1], self.end), tuple(said), (self.serving,)


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
        from specjax.training.jobs.calibration import calibrated  # few runs need it

        job = calibrated(job, options.auto_losses, options.auto, options.auto_prompts)
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
    if options.loss != AUTO:
        options = dataclasses.replace(options, anneal_steps=annealing(options))
    options, target, teacher, mesh = opened(options, options.settings)
    if teacher is not None:
        options = _recorded(options, teacher)
    options = student.no_wider(options, target.model.module.config)
    _check_start(options, target)
    if teacher is None:
        options, material = _beside_target(options, target)
    else:
        material = RecordedMaterial.of(teacher)
    draft = student.make_model(options, target.model.vocab_size, target.model.max_positions)
    trained = None
    if options.early_exit is not None:
        draft, trained = student.exit_of(draft, target, options.early_exit)
    assert target.tokenizer is not None  # the data was read with it
    end = starts_of_documents(target.tokenizer, options.isolate_documents)
    kind = Distill if teacher is None else DistillRecorded
    job = kind(options, target, material, draft, end, trained, mesh=mesh)
    job.say_sizes(trained=num_params(jax.eval_shape(job.init)) if job.trained else 0)
    return job


def _beside_target(
    options: DistillOptions, target: LanguageModel
) -> tuple[DistillOptions, Material]:
    """Returns the data for a target in memory."""
    options, material = sampled(options, target, options.loss == ACCEPTED_LENGTH)
    written, share = material.written, options.sampled_fraction
    settle(
        (
            material.text is None and share is not None and share < 1,
            "--data holds only sequences of prompts and answers: add a folder of text, or pass "
            "--sampled-fraction 1",
        ),
        (
            options.pack and written is None,
            "--pack: there are no sequences with answers to pack; leave it out",
        ),
    )
    if written is not None and options.loss == ACCEPTED_LENGTH:
        written = with_starts(written, options.num_drafts)
    if written is not None and options.pack:
        written = written.packed()
    return options, dataclasses.replace(material, written=written)


def _recorded(options: DistillOptions, teacher: Recorded) -> DistillOptions:
    """Returns the options, some of which a recording decides."""
    most = teacher.request.top
    if options.top > most:
        raise ValueError(
            f"--top is {options.top}; --teacher {options.teacher} has {most} "
            "log-probabilities of each token: pass no more, or record it again"
        )
    share = share_of_answers(options.sampled_fraction, teacher)
    return dataclasses.replace(options, top=options.top or most, sampled_fraction=share)


def _check_start(options: DistillOptions, target: LanguageModel) -> None:
    """Checks the tokens of a model that the draft starts from."""
    start = options.start
    # The target's own layers have its tokens, also if a LoRA brings a tokenizer.
    foreign = None if start is None or start.folder == options.target else start
    student.check_initial(
        foreign, target.tokenizer, target.model.vocab_size, f"--target {options.words}",
        "a draft must share the target's tokens: pass one that was trained for this target",
        "--teacher" if options.teacher else "--draft-fraction" if options.draft_fraction else "",
    )  # fmt: skip
