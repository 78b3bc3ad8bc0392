"""specjax train drafter: train a drafter that reads hidden states of its target.

--kind eagle3, peagle, mtp, dflash or dspark.  The target reads each batch once and stays frozen.
The drafter learns from its hidden states at a few layers to predict what the target would say, from
many positions of every text at once.  With --teacher it learns from the hidden states that
train.teacher has recorded, and only the target's embedding and output matrix are in memory.
(`--kind model` and `--kind medusa` are train.distill and train.medusa.)

The exported folder is one that specjax.load_drafter reads, and the method's own tools, too.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax._internal.checks import settle
from specjax.contract import BlockSource, Proposer, Source
from specjax.decoding import Decoder
from specjax.drafters import load_drafter, save_drafter
from specjax.methods import PublishedDrafter, SharedParams, own_shardings, sizes_of
from specjax.models import LanguageModel, Tables, TransformerConfig, head_matrix
from specjax.options.command import parse
from specjax.options.fields import REQUIRED, count, inside, option
from specjax.parallel import TRAINING_RULES, put, row_parts, to_host
from specjax.proposers import Chain, ChoiceTree
from specjax.rules import Match
from specjax.training.drafters import KINDS, draft_vocabulary, draw_anchors, mask_token, plan
from specjax.training.drafters.learner import Drafts, Guess, Learner, Lesson
from specjax.training.drafters.sizes import Sizes
from specjax.training.features import Features
from specjax.training.jobs import distill, medusa
from specjax.training.jobs.taught import TaughtJob
from specjax.training.lock import alone
from specjax.training.loop import fit
from specjax.training.losses import chunked_with_rows
from specjax.training.material import learned
from specjax.training.mesh import lay_batch
from specjax.training.objectives import OBJECTIVES, binary_cross_entropy, mean_of, per_row
from specjax.training.online import begin, roll_out, row_keys
from specjax.training.ordering import Rows
from specjax.training.record import num_params
from specjax.training.recordings import RecordedMaterial, opened, share_of_answers
from specjax.training.sources import SampledOptions, sampled
from specjax.training.targets import reader
from specjax.training.trees import Batch, Row, Tree
from specjax.types import Json, Params


@dataclasses.dataclass(frozen=True)
class DrafterOptions(Sizes, SampledOptions):
    """The target, the data, the drafter's network, and the loop."""

    group = "drafter"
    common = (
        "target", "dtype", "data", "teacher", "mesh", "steps", "batch_size",
        "learning_rate", "optimizer", "out", "sequence_length", "seed", "eval_every",
        "save_every", "curves", "kind", "num_drafts", "num_layers", "taps",
        "draft_vocab_size", "initial", "loss", "anchors", "sampled_fraction",
        "sampled_sequences", "online", "layout", "eval_prompts",
    )  # fmt: skip

    kind: str = option(REQUIRED, "kind of drafter", choices=tuple(KINDS))
    dtype: str | None = option(
        None,
        "type of the target's weights; by default float32 on a CPU, else bfloat16",
        choices=("float32", "bfloat16"),  # it shares matrices with the drafter
    )
    mask_token: int | None = option(
        None,
        "id that stands for a token that is not there yet; by default the target's padding or mask "
        "token, or else its EOS token",
    )
    initial: str | None = option(
        None,
        "folder of a drafter of this kind to start from, whose layers keep their sizes; default: "
        "random",
    )
    loss: str | None = option(
        None,
        "training loss; by default forward-kl for eagle3, mtp and peagle, cross-entropy for "
        "dflash, and cross-entropy-l1 for dspark",
        choices=tuple(OBJECTIVES),
    )
    depth_decay: float | None = option(
        None,
        "weight of a depth's loss relative to the depth before; by default as the authors do",
        "[0, 1]",
    )
    confidence_weight: float = option(
        1.0, "weight of the loss of the estimated acceptance", "[0, inf)"
    )
    anchors: int = count(
        0,
        "positions of a sequence from which drafts are learned (eagle3, mtp and peagle learn the "
        "first depth at every position); 0: an eighth of --sequence-length",
        0,
    )
    temperature: float = option(1.0, "temperature of the generated sequences", "[0, inf)")
    keep_features: float = option(
        0.0,
        "gigabytes of the target's hidden states that are kept in OUT/features, so that a sequence "
        "that comes again is not read again; 0: none",
        "[0, inf)",
    )
    layout: str | None = option(
        None, "layout of the exported folder; by default that of the method's authors"
    )
    sequence_length: int = count(256, "tokens per sequence")
    batch_size: int = count(8, "sequences per step")
    learning_rate: float = option(1e-3, "peak learning rate", "(0, inf)")
    weight_decay: float = option(0.0, "weight decay, on matrices only", "[0, inf)")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_teacher({"--online": self.online, "--keep-features": self.keep_features}, {})
        length, other = self.sequence_length, "sampled-fraction"
        if not self.sampled_fraction:
            other = "keep-features"
        settle(
            (
                list(self.taps) != sorted(set(self.taps)),
                f"--taps is {' '.join(map(str, self.taps))}; the layers must be distinct and "
                "ascending",
            ),
            (
                self.draft_vocab_size and self.own_head is False,
                "--draft-vocab-size needs an output matrix of the drafter's own: leave out "
                "--no-own-head",
            ),
            (
                self.num_drafts + 2 > length,
                f"--sequence-length is {length}; drafts of depth {self.num_drafts} need "
                f"{self.num_drafts + 2} or more",
            ),
            (
                self.anchors > length,
                f"--anchors is {self.anchors}; a sequence has {length} positions",
            ),
            (
                self.sampled_prompt > length and self.teacher is None,
                f"--sampled-prompt {self.sampled_prompt} is more than --sequence-length {length}",
            ),
            (
                self.online and (self.sampled_fraction or self.keep_features),
                f"--online learns from new text in every step: leave out --{other}",
            ),
            (
                self.online and not self.online_steps,
                f"--sequence-length {length} has no room for --num-drafts {self.num_drafts} after "
                f"--sampled-prompt {self.sampled_prompt}",
            ),
        )

    @property
    def online_steps(self) -> int:
        """The steps of speculation that fit into a sequence even if every draft is accepted."""
        return (self.sequence_length + 1 - self.sampled_prompt) // (self.num_drafts + 1)

    def share_beside_text(self, has_answers: bool) -> float:
        return 0.5 if has_answers and not self.online else 0.0

    @property
    def num_anchors(self) -> int:
        return self.anchors or max(1, self.sequence_length // 8)

    @property
    def settings(self) -> dict[str, float]:
        return {"temperature": self.temperature, "top_k": 0, "top_p": 1.0}


class Start(NamedTuple):
    """A drafter from which training starts."""

    folder: str
    drafter: PublishedDrafter
    learner: Learner  # of a drafter with the layers of that one


def start_from(options: DrafterOptions, target: LanguageModel, mine: Learner) -> Start:
    """Loads the folder `--initial`, whose layers may have other sizes than those of a new drafter.

    Raises:
      ValueError: the folder's drafter has another kind or shape than the options say.
    """
    folder = options.initial
    assert folder is not None
    loaded = load_drafter(folder, target, rules=TRAINING_RULES)
    if not isinstance(loaded, PublishedDrafter) or type(loaded.source) is not type(mine.source):
        theirs = loaded.source if isinstance(loaded, PublishedDrafter) else loaded
        raise ValueError(
            f"--initial {folder} is not a drafter of --kind {options.kind}, which has a "
            f"{type(mine.source).__name__} and not a {type(theirs).__name__}: pass another "
            "folder, or its kind"
        )
    asked = {name: getattr(options, name) for name in ("num_layers", "mlp_size")}
    asked = {name: size for name, size in asked.items() if size is not None}
    source = _with_layers(mine.source, loaded.source, asked)
    faults = _differences(loaded.source, source)
    has, cure = ("no", "no-own-head") if mine.own_head else ("an", "own-head")
    settle(
        (
            faults,
            f"--initial {folder} has another shape than these options describe:\n  "
            + "\n  ".join(faults),
        ),
        (
            ("head" in loaded.shares) == mine.own_head,
            f"--initial {folder} has {has} output matrix of its own: pass --{cure}",
        ),
    )
    return Start(folder, loaded, dataclasses.replace(mine, source=source))


def initial_params(options: DrafterOptions, start: Start, to_draft: np.ndarray | None) -> Tree:
    """Returns the parameters of a start in float32.

    `to_draft` [V] is the drafter's id of each token, or -1; it is None if the drafter knows all
    tokens.  If the start has another vocabulary, this raises ValueError.
    """
    own = dict(start.drafter.params)
    theirs = own.pop("to_draft", None)
    size = "all tokens" if theirs is None else f"{(np.asarray(theirs) >= 0).sum()} tokens"
    known = [None if table is None else np.asarray(table).tolist() for table in (theirs, to_draft)]
    if known[0] != known[1]:
        raise ValueError(
            f"--initial {start.folder} knows {size}, and --draft-vocab-size "
            f"{options.draft_vocab_size} of this --data are others: pass the number and the data "
            "that it was trained with"
        )
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), own)


SourceT = TypeVar("SourceT")


def _with_layers(mine: SourceT, theirs: object, asked: Mapping[str, int]) -> SourceT:
    """Returns `mine` with the layers of `theirs`, but for the sizes that are `asked` for."""
    if type(theirs) is not type(mine) or not dataclasses.is_dataclass(mine):
        return mine
    changed = {}
    for name, own in vars(mine).items():
        other = vars(theirs)[name]
        if isinstance(own, TransformerConfig) and isinstance(other, TransformerConfig):
            changed[name] = dataclasses.replace(other, **asked)
        else:
            changed[name] = _with_layers(own, other, asked)
    return dataclasses.replace(cast(Any, mine), **changed)


_FORM = ("dot_general", "attend")
"""Fields that say how a network computes, and not what."""


def _differences(theirs: object, mine: object, name: str = "") -> list[str]:
    """Returns a line for each field in which two configurations differ."""
    if type(theirs) is type(mine) and dataclasses.is_dataclass(mine):
        return [
            line
            for field in dataclasses.fields(mine)
            if field.compare and field.name not in _FORM
            for line in _differences(
                vars(theirs)[field.name], vars(mine)[field.name], f"{name}.{field.name}"
            )
        ]
    return [] if theirs == mine else [f"{name[1:]}: {theirs} in the folder, {mine} by the options"]


@dataclasses.dataclass(eq=False)
class TrainDrafter(TaughtJob[DrafterOptions]):
    """Trains a drafter of any kind in `KINDS`; its parameters are those of `SharedParams.own`."""

    learner: Learner
    known: np.ndarray | None  # [U] the drafter's tokens, if its vocabulary is reduced
    start: Start | None = None

    def __post_init__(self) -> None:
        self.reader = reader(self.target)
        # The target's output matrix may be its embedding.
        head = "head" if "head" in self.frozen else "embedding"
        self.used = ("embedding",) if self.learner.own_head else tuple({"embedding", head})
        size, self.to_draft = self.target.model.vocab_size, None
        if self.known is not None:
            self.to_draft = np.full(size, -1, np.int32)
            self.to_draft[self.known] = np.arange(len(self.known))

    def init(self) -> Tree:
        return self._laid(self.unlaid())

    def unlaid(self) -> Tree:
        """Returns the first parameters, on no mesh."""
        if self.start is None:
            return self.fresh()
        return initial_params(self.options, self.start, self.to_draft)

    def fresh(self) -> Tree:
        """Returns random parameters from `--seed`; an output matrix starts as the target's."""
        own = {**self.learner.init(jax.random.key(self.options.seed))}
        if self.learner.own_head:
            matrix = head_matrix(self.frozen).astype(jnp.float32)
            matrix = matrix if self.known is None else jnp.take(matrix, self.known, axis=1)
            own["head"] = {"kernel": jnp.copy(matrix)}
        # The final norm feeds the target's matrix, so it starts as the target's own.
        return self._with_norm(own)

    def _laid(self, own: Tree) -> Tree:
        """Puts parameters onto the run's mesh."""
        if self.mesh is None:
            return own
        at = own_shardings(self.learner.source, own, self.mesh, TRAINING_RULES)
        return jax.tree.map(put, to_host(own), at)

    def _with_norm(self, own: Tree) -> Tree:
        part = "network" if "network" in own else "draft"
        network = cast(dict[str, dict[str, Array]], own[part])
        theirs = self.target.params.get("norm", {}).get("weight")
        offset = (
            self.target.model.module.config.norm_offset - self.learner.source.layers.norm_offset
        )
        if theirs is None or theirs.shape != network["norm"]["weight"].shape:
            return own
        weight = jnp.copy(theirs.astype(jnp.float32)) + offset
        return {**own, part: {**network, "norm": {"weight": weight}}}

    def batch(self, step: int) -> Row:
        made = self.batches[step]
        if self.features is not None:
            made["states"] = self.features.of(made["tokens"][:, :-1])
        return made

    @functools.cached_property
    def batches(self) -> Rows:
        """Returns the rows of each step."""
        o = self.options
        share = 0.0 if o.online else o.sampled_fraction or 0.0
        return self.material.batches(o.sequence_length, o.batch_size, o.seed, share)

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

    def shared(self, own: Tree, frozen: Tree) -> SharedParams:
        """Returns the parameters as the drafter's network takes them."""
        return SharedParams(cast(Tables, own), {name: frozen[name] for name in self.used})

    def _states(self, frozen: Tree, inputs: Array) -> Array:
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

    def _speculated(self, own: Tree, frozen: Tree, batch: Batch) -> Drafts:
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
        self, own: Tree, frozen: Tree, batch: Batch, drafts: Drafts
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

    def loss(self, params: Tree, frozen: Tree, batch: Batch) -> tuple[Array, dict[str, Array]]:
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

    def drafter(self, own: Tree) -> PublishedDrafter:
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
        shares = () if "embedding" in own else ("embedding",)
        shares += () if self.learner.own_head else ("head",)
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
        def alphas(params: Tree, frozen: Tree, batch: Batch) -> Array:
            """Returns [2, D] sums of weight * alpha, and of weights."""
            measured = self._measured(params, frozen, batch, self._chosen(batch))
            sums = [(jnp.sum(g.weight * alpha), weight) for g, weight, _, alpha in measured]
            return jnp.array(sums).T

        return jax.jit(alphas)

    def evaluate(self, params: Tree) -> dict[str, float]:
        o, sums = self.options, np.zeros((2, self.options.num_drafts))
        rows = -(-o.batch_size // row_parts(self.mesh)) * row_parts(self.mesh)
        held_out = self.material.test(o.sequence_length, rows)
        for i in range(o.eval_batches):
            numbers = np.arange(i * rows, (i + 1) * rows, dtype=np.int32)
            batch = {**held_out[i], "number": numbers}
            batch = lay_batch(batch, self.mesh)
            sums = sums + np.asarray(to_host(self._measure(params, self.frozen, batch)), float)
        alpha = sums[0] / np.maximum(sums[1], 1)
        report = {f"held_out_alpha_{depth}": float(value) for depth, value in enumerate(alpha)}
        # Of a chain that is sampled, if acceptances of different depths were independent.
        report["held_out_length"] = float(1 + np.cumprod(alpha).sum())
        drafter = self.drafter(params)
        arrays = Params(self.frozen, self.shared(drafter.params, self.frozen))
        return report | self.tau(drafter.proposer, arrays, {"temperature": 0.0})

    @property
    def size(self) -> int:
        """The number of trained parameters."""
        return num_params(jax.eval_shape(self.unlaid))

    @property
    def models(self) -> dict[str, dict[str, Json]]:
        o, taps = self.options, self.learner.source.taps
        mine = {"folder": o.initial, "kind": o.kind, "taps": taps, "parameters": self.size}
        return {**super().models, "drafter": mine}

    def goal(self, report: dict[str, float]) -> float:
        """Returns tau where it is measured; else the expected length of a sampled chain."""
        return report.get("tau", report["held_out_length"])

    def export(self, params: Tree, folder: pathlib.Path) -> None:
        save_drafter(folder, self.drafter(params), self.target, self.options.layout, jnp.bfloat16)


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
    if options.keep_features and jax.process_count() > 1:
        raise ValueError("--keep-features works in a single process: leave it out")
    options, target, teacher, mesh = opened(options)
    config, known = target.model.module.config, None
    inside(options, f"[0, {target.model.vocab_size - 1}]", "mask_token")
    learner = plan(options.kind, options, config, mask_token(target, options.mask_token))
    start = None if options.initial is None else start_from(options, target, learner)
    learner = learner if start is None else start.learner
    if teacher is not None:
        share = share_of_answers(options.sampled_fraction, teacher)
        options = dataclasses.replace(options, sampled_fraction=share)
        material = RecordedMaterial.of(teacher.tapping(learner.source.taps))
    else:
        options, material = sampled(options, target)
        if material.text is None:
            options = dataclasses.replace(options, sampled_fraction=1.0)
    if options.draft_vocab_size:
        counts = material.token_counts(config.vocab_size)
        known = draft_vocabulary(counts, options.draft_vocab_size, target.eos)
    job = TrainDrafter(options, target, material, learner, known, start, mesh=mesh)
    job.say_sizes(f"; taps {learner.source.taps}")
    if job.features is not None:
        print(job.features, flush=True)
    return job
