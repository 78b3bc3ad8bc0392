"""python -m train.drafter: train a drafter that reads hidden states of its target.

--kind eagle3, peagle, dflash or dspark.  The target reads each batch once and stays frozen.  The
drafter learns from its hidden states at a few layers to predict what the target would say, from
many positions of every text at once.  (`--kind model` and `--kind medusa` are train.distill and
train.medusa.)

The exported folder is one that specjax.load_drafter reads, and the method's own tools, too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax import Array
from jax.sharding import Mesh

from specjax.contract import Arrays, BlockSource, Proposer
from specjax.decoding import Decoder
from specjax.drafters import PublishedDrafter, own_shardings, sizes_of
from specjax.files import load_drafter, save_drafter
from specjax.models import LanguageModel, SharedParams, head_matrix
from specjax.parallel import TRAINING_RULES, put, row_parts, to_host
from specjax.proposers import Chain, ChoiceTree
from specjax.rules import Match
from specjax.sampling import make_key
from specjax.training import dataset
from specjax.training.dataset import Written, initial_hash, model_hashes
from specjax.training.drafters import Guess, Learner, Lesson, draft_vocabulary, draw_anchors, plan
from specjax.training.jobs import distill, medusa
from specjax.training.jobs.drafter_options import DrafterOptions
from specjax.training.lock import alone
from specjax.training.loop import fit
from specjax.training.losses import chunked_with_rows
from specjax.training.material import Material, gather, held_out_prompts, held_out_rows, learned
from specjax.training.measure import measure_tau
from specjax.training.mesh import lay_batch, mesh_of_run
from specjax.training.objectives import OBJECTIVES, per_row
from specjax.training.options import parse, run
from specjax.training.sources import mixed_rows, sample, share_of_target
from specjax.training.targets import load_target, reader
from specjax.types import Params

Batch = Mapping[str, Array]
"""A batch of `TrainDrafter.batch`, as the traced loss sees it."""

FRONT_DOORS = {"model": distill.main, "medusa": medusa.main}
"""Kinds that have a job of their own."""

_PLACEHOLDERS = ("[PAD]", "<pad>", "<|pad|>", "<|mask|>", "[MASK]", "<mask>", "<|endoftext|>")


@dataclasses.dataclass(eq=False)
class TrainDrafter:
    """A drafter of any kind in `KINDS`; its parameters are those of `SharedParams.own`."""

    options: DrafterOptions
    target: LanguageModel
    learner: Learner
    material: Material
    written: Written | None  # sequences that the target wrote
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
            return self._initial(self.options.initial)
        return self._laid(self.fresh())

    def fresh(self) -> Arrays:
        """Random parameters from `--seed`; an output matrix starts as the target's."""
        own = self.learner.init(jax.random.key(self.options.seed))
        if self.learner.own_head:
            matrix = head_matrix(self.frozen).astype(jnp.float32)
            matrix = matrix if self.known is None else jnp.take(matrix, self.known, axis=1)
            own["head"] = {"kernel": jnp.copy(matrix)}
        # The final norm feeds the target's matrix, so it starts as the target's own.
        return self._with_norm(own)

    def _laid(self, own: Arrays) -> Arrays:
        """Parameters on the run's mesh."""
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

    def _initial(self, folder: str) -> Arrays:
        """The parameters of the folder `--initial`.

        Raises:
          ValueError: it holds a drafter of another kind or shape.
        """
        loaded = load_drafter(folder, self.target, rules=TRAINING_RULES)
        mine = self.learner.source
        if not isinstance(loaded, PublishedDrafter) or type(loaded.source) is not type(mine):
            raise ValueError(
                f"--initial {folder} is not a drafter of --kind {self.options.kind}: pass another "
                "folder, or its kind"
            )
        faults = _differences(loaded.source, mine)
        if faults:
            raise ValueError(
                f"--initial {folder} has another shape than these options describe:\n  "
                + "\n  ".join(faults)
            )
        if ("head" in loaded.shares) == self.learner.own_head:
            raise ValueError(
                f"--initial {folder} has "
                + ("no output matrix" if self.learner.own_head else "an output matrix")
                + " of its own: pass --"
                + ("no-" if self.learner.own_head else "")
                + "own-head"
            )
        own = dict(loaded.params)
        theirs = own.pop("to_draft", None)
        if (theirs is None) != (self.known is None) or not np.array_equal(
            np.arange(0) if theirs is None else theirs,
            np.arange(0) if self.to_draft is None else self.to_draft,
        ):
            size = "all tokens" if theirs is None else f"{(np.asarray(theirs) >= 0).sum()} tokens"
            raise ValueError(
                f"--initial {folder} knows {size}, and --draft-vocab-size "
                f"{self.options.draft_vocab_size} of this --data are others: pass the number and "
                "the data that it was trained with"
            )
        return self._laid(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), own))

    def batch(self, step: int) -> dict[str, np.ndarray]:
        return mixed_rows(self.options, step, self.material.text, self.written)[0]

    def show(self, batch: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens, and which of them are learned, for --show-mask."""
        return batch["tokens"], np.asarray(learned(batch["drawn"]))

    def shared(self, own: Arrays, frozen: Arrays) -> SharedParams:
        """The parameters as the drafter's network takes them."""
        return SharedParams(own, {name: frozen[name] for name in self.used})

    def _guesses(
        self, params: SharedParams, frozen: Arrays, batch: Batch
    ) -> tuple[list[Guess], Array]:
        """The drafter's guesses, and the target's last hidden states [B, T, E]."""
        tokens, mask = batch["tokens"], learned(batch["drawn"])
        inputs = tokens[:, :-1]
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
        out = self.reader.apply(frozen, inputs, positions, taps=self.learner.source.taps)
        out = jax.lax.stop_gradient((out.hidden, out.features))
        keys = jax.vmap(lambda n: jax.random.fold_in(make_key(self.options.seed), n))(
            batch["number"]
        )
        anchors, present = draw_anchors(keys, mask, self.options.num_anchors)
        hidden, features = out
        assert features is not None  # every learner reads taps
        lesson = Lesson(tokens, mask, features, anchors, present)
        return self.learner.guesses(params, lesson), hidden

    def _measured(
        self, params: SharedParams, frozen: Arrays, batch: Batch
    ) -> list[tuple[Guess, Array, Array, Array]]:
        """For each depth the guess, its total weight, its summed loss, and alpha [B, A]."""
        o, tokens = self.options, batch["tokens"]
        guesses, hidden = self._guesses(params, frozen, batch)
        objective = OBJECTIVES[o.loss or self.learner.objective]
        cap = self.target.model.module.config.logit_softcap
        loss = chunked_with_rows(
            per_row(objective, self.learner.softcap, cap), trains_head=self.learner.trains_head
        )
        shared, head = (head_matrix(frozen), self.known), self.learner.head(params)
        measured = []
        for guess in guesses:
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
        for guess, weight, value, alpha in self._measured(
            self.shared(params, frozen), frozen, batch
        ):
            share = decay**guess.depth
            total, whole = total + share * value / jnp.maximum(weight, 1), whole + share
            metrics[f"alpha_{guess.depth}"] = _mean(alpha, guess.weight)
            if guess.confidence is not None:
                sure = sure + share * jnp.sum(
                    guess.weight * _binary_cross_entropy(guess.confidence, alpha)
                )
                counted = counted + share * weight
        total = total / whole
        # All rows have the same number of anchors, so parts of a batch count by their rows.
        metrics["weight"] = jnp.float32(len(batch["tokens"]))
        if self.learner.estimates:
            metrics["loss_confidence"] = sure / jnp.maximum(counted, 1)
            total = total + o.confidence_weight * metrics["loss_confidence"]
        return total, metrics

    def drafter(self, own: Arrays) -> PublishedDrafter:
        """The drafter with these parameters, whose drafts are a chain."""
        if self.to_draft is not None:
            own = {**own, "to_draft": jnp.asarray(self.to_draft)}
        source = self.learner.source
        chain: Proposer = (
            ChoiceTree(source)
            if isinstance(source, BlockSource)
            else Chain(source, self.options.num_drafts)
        )
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
            """[2, D] sums of weight * alpha, and of weights."""
            measured = self._measured(self.shared(params, frozen), frozen, batch)
            sums = [(jnp.sum(g.weight * alpha), weight) for g, weight, _, alpha in measured]
            return jnp.array(sums).T

        return jax.jit(alphas)

    def evaluate(self, params: Arrays) -> dict[str, float]:
        o, sums = self.options, np.zeros((2, self.options.num_drafts))
        rows = -(-o.batch_size // row_parts(self.mesh)) * row_parts(self.mesh)
        for i in range(o.eval_batches):
            tokens, drawn = held_out_rows(self.material.held_out, i, rows, o.sequence_length)
            batch = {
                "tokens": tokens,
                "drawn": drawn,
                "number": np.arange(i * rows, (i + 1) * rows, dtype=np.int32),
            }
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

    def goal(self, report: dict[str, float]) -> float:
        """tau where it is measured; else the expected length of a sampled chain."""
        return report.get("tau", report["held_out_length"])

    def export(self, params: Arrays, folder: pathlib.Path) -> None:
        save_drafter(folder, self.drafter(params), self.target, self.options.layout, jnp.bfloat16)


def _differences(theirs: object, mine: object, name: str = "") -> list[str]:
    """A line for each field in which two configurations differ."""
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


def _mean(x: Array, weight: Array) -> Array:
    return jnp.sum(weight * x) / jnp.maximum(weight.sum(), 1)


def _binary_cross_entropy(estimate: Array, alpha: Array) -> Array:
    estimate = jnp.clip(estimate, 1e-6, 1 - 1e-6)
    return -(alpha * jnp.log(estimate) + (1 - alpha) * jnp.log1p(-estimate))


def mask_token_of(options: DrafterOptions, target: LanguageModel) -> int:
    """The id that stands for a token that is not there yet.

    Raises:
      ValueError: the id is none of the target's, or the target has no token that could be it.
    """
    size = target.model.vocab_size
    if options.mask_token is not None:
        if not 0 <= options.mask_token < size:
            raise ValueError(
                f"--mask-token is {options.mask_token}; it must lie in [0, {size - 1}]"
            )
        return options.mask_token
    assert target.tokenizer is not None  # `gather` has checked it
    ids = (target.tokenizer.token_to_id(name) for name in _PLACEHOLDERS)
    found = [*(number for number in ids if number is not None), *target.eos]
    if not found:
        raise ValueError(
            "the target's tokenizer has no padding, mask or EOS token: name an id that its texts "
            "rarely hold, with --mask-token"
        )
    return found[0]


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    other = [kind for kind in FRONT_DOORS if arguments[:2] == ["--kind", kind]]
    if other:
        FRONT_DOORS[other[0]](arguments[2:])
        return
    options = parse(DrafterOptions, argv, __doc__)
    with alone(options.out, writes=not options.show_mask):
        train(options)


def train(options: DrafterOptions) -> None:
    """Run the job in a folder that the caller holds."""
    mesh = mesh_of_run(options)
    target = load_target(options, options.dtype, mesh)
    material = gather(options, target, options.settings)
    default = 0.0 if material.written is None else 0.5
    share = share_of_target(options.sampled_fraction, default, material)
    config, known = target.model.module.config, None
    learner = plan(options.kind, options, config, mask_token_of(options, target))
    if options.draft_vocab_size:
        known = draft_vocabulary(material, options.draft_vocab_size, config.vocab_size, target.eos)
    written = material.written
    if share and written is None and material.text is not None:
        hashes, folder = (
            model_hashes(options.target, options.lora),
            pathlib.Path(options.out) / "sampled",
        )
        sample(target, material.text, options, folder, hashes)
        rows = dataset.read_masked(folder, hashes)
        written = Written.of(rows, options.sequence_length)
    share = 1.0 if material.text is None else share
    options = dataclasses.replace(options, sampled_fraction=share)
    job = TrainDrafter(options, target, learner, material, written, known, mesh)
    counts = {
        "target": target.num_params,
        "drafter": sum(x.size for x in jax.tree.leaves(jax.eval_shape(job.fresh))),
    }
    print(f"parameters: {json.dumps(counts)}; taps {learner.source.taps}", flush=True)
    fit(job, options)


if __name__ == "__main__":
    run(main)
