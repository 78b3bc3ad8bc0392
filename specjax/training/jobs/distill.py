"""python -m train.distill: a small draft learns to say what the target would say.

From windows of text, from what the target wrote, from what the draft writes, or inside speculation itself (--online).
What is written is where a draft is used; the text keeps it from knowing only favourite phrases.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from specjax.decoding import Decoder
from specjax.files import load
from specjax.models import LanguageModel, LinenModel, head_matrix
from specjax.parallel import TRAINING_RULES, row_parts, to_host
from specjax.proposers import DraftModel, NoProposer
from specjax.rules import Match
from specjax.sampling import Sampling, make_key
from specjax.training import accepted, dataset, online
from specjax.training.corpus import TextOptions, Tokens, starts_of_documents
from specjax.training.dataset import Written, model_hashes
from specjax.training.divergences import DIVERGENCES, blend
from specjax.training.loop import LoopOptions, fit
from specjax.training.losses import against, agreement, chunked, chunked_rows, log_draft
from specjax.training.material import gather, held_out_prompts, held_out_rows, learned
from specjax.training.measure import measure_tau
from specjax.training.mesh import lay_batch, mesh_of_run
from specjax.training.options import REQUIRED, at_least, option, parse, run, within
from specjax.training.precision import mixed_dot_general
from specjax.training.sources import DRAFT, TARGET, TEXT, sample, sources, with_starts
from specjax.training.student import (
    ModelOptions,
    check_initial,
    initial_params,
    make_model,
    read,
    save_student,
)
from specjax.types import Params

ACCEPTED_LENGTH = "accepted-length"
_ROWS = 4  # of a held-out batch


@dataclasses.dataclass(frozen=True)
class DistillOptions(LoopOptions, ModelOptions, TextOptions):
    """The target, the data, the draft's sizes, and the loop."""

    target: str = option(REQUIRED, "folder of the target")
    loss: str = option("forward-kl", "what falls", choices=(*DIVERGENCES, ACCEPTED_LENGTH))
    anneal_steps: int | None = option(
        None,
        "steps in which the loss goes over from forward KL; 0: none; by default 4/5 of --steps "
        "where total-variation or accepted-length begin without --initial, else none",
    )
    num_drafts: int = option(
        4, "guesses per step (gamma): of accepted-length, --online and --eval-prompts"
    )
    temperature: float = option(
        1.0, "that the target is to be served with: in its text, and in the loss"
    )
    top_k: int = option(0, "likewise")
    top_p: float = option(1.0, "likewise")
    sampled_fraction: float = option(0.5, "part of the sequences that the target wrote")
    draft_fraction: float = option(0.0, "part of the sequences that the draft writes, in the step")
    learn_prompts: bool = option(False, "learn the prompts of sequences with answers, too")
    mix: str = option(
        "sequence",
        "do the parts hold in every batch, or is a batch of one part",
        choices=("sequence", "batch"),
    )
    online: bool = option(
        False, "learn from the verification of guesses, rejected ones too; only that"
    )
    sampled_sequences: int = option(1024, "how many sequences the target writes")
    sampled_prompt: int = option(32, "tokens of text that the target or the draft continues")
    sampled_batch: int = option(16, "sequences that the target writes at once")
    eval_batches: int = option(32, "held-out batches per evaluation")
    eval_prompts: int = option(
        0, "held-out prompts on which tau is measured, through the decoder; 0: none"
    )
    eval_tokens: int = option(64, "new tokens for each of them")
    hidden_size: int = option(128, "features per token")
    mlp_size: int = option(352, "features inside the MLP")
    num_layers: int = option(1, "layers")
    num_heads: int = option(2, "query heads")
    num_kv_heads: int = option(1, "key and value heads")

    def __post_init__(self):
        super().__post_init__()
        at_least(
            self,
            1,
            "num_drafts",
            "sampled_sequences",
            "sampled_batch",
            "eval_batches",
            "eval_tokens",
        )
        at_least(self, 0, "eval_prompts")
        if self.anneal_steps is not None:
            at_least(self, 0, "anneal_steps")
        within(self, 0, 1, "sampled_fraction", "draft_fraction")
        Sampling.create(1, **self.settings)
        if not 0 < self.sampled_prompt < self.sequence_length:
            raise ValueError(
                f"--sampled-prompt is {self.sampled_prompt}; it must be shorter than a sequence, and not 0"
            )
        if self.sampled_fraction + self.draft_fraction > 1:
            raise ValueError(
                f"--sampled-fraction {self.sampled_fraction} and --draft-fraction {self.draft_fraction} are more than 1"
            )
        if self.loss == "reverse-kl" and (self.temperature == 0 or self.top_k or self.top_p < 1):
            raise ValueError(
                "--loss reverse-kl is infinite where the target leaves tokens out (--temperature 0, --top-k, --top-p): "
                "take jensen-shannon or total-variation"
            )
        if self.loss == ACCEPTED_LENGTH and (self.online or self.sampled_fraction < 1):
            raise ValueError(
                "--loss accepted-length is a mean over text that the target wrote: pass --sampled-fraction 1, and "
                "neither --online nor --draft-fraction"
            )
        if self.num_drafts > self.sequence_length or (self.online and not self.online_steps):
            raise ValueError(
                f"--sequence-length {self.sequence_length} has no room for --num-drafts {self.num_drafts}"
                + f" behind --sampled-prompt {self.sampled_prompt}" * self.online
            )
        if self.eval_prompts and self.sampled_prompt + self.eval_tokens > self.sequence_length:
            raise ValueError(
                f"--eval-tokens {self.eval_tokens} behind --sampled-prompt {self.sampled_prompt} are more than "
                f"--sequence-length {self.sequence_length}"
            )

    @property
    def settings(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    @property
    def online_steps(self) -> int:
        """Steps of speculation that fit into a sequence, however many guesses they accept."""
        return (self.sequence_length - self.sampled_prompt) // (self.num_drafts + 1)


@dataclasses.dataclass(eq=False)
class Distill:
    """A divergence from a frozen target, or the expected accepted length."""

    options: DistillOptions
    draft: LinenModel
    target: LanguageModel
    text: Tokens | None
    held_out: Tokens | Written
    written: Written | None
    end: int | None  # the token that starts a document, where documents are isolated
    inputs: dict[str, str]
    mesh: Mesh | None = None

    def __post_init__(self):
        # Numbers of the options, and so constants of the program: what is switched off costs nothing.
        plain = self.options.settings == {"temperature": 1, "top_k": 0, "top_p": 1}
        self.serving = None if plain else Sampling.create(1, **self.options.settings)
        self.reader = LinenModel(self.target.model.module.clone(dot_general=mixed_dot_general))

    @property
    def frozen(self) -> Any:
        return self.target.params

    @property
    def tokenizer(self) -> Any:
        return self.target.tokenizer

    def init(self) -> Any:
        return initial_params(self.draft, self.options, self.mesh)

    def batch(self, step: int) -> dict[str, np.ndarray]:
        o, rows = self.options, self.options.batch_size
        first, counts = sources(o, step)
        tokens, drawn = [], np.zeros((rows, o.sequence_length), np.float32)
        limit = np.full(rows, o.sequence_length, np.int32)
        from_text = counts[TEXT] + counts[DRAFT]
        if from_text and self.text is not None:
            start = first[TEXT] + first[DRAFT]
            tokens.append(self.text.rows(start, from_text, o.sequence_length, o.seed))
        if counts[TARGET] and self.written is not None:
            found = self.written.rows(first[TARGET], counts[TARGET], o.seed)
            tokens.append(found.tokens)
            drawn[from_text:], limit[from_text:] = found.drawn, found.limit
        batch = {
            "tokens": np.concatenate(tokens),
            "drawn": drawn,
            "limit": limit,
            "number": step * rows + np.arange(rows, dtype=np.int32),
        }
        share = min(1.0, step / o.anneal_steps) if o.anneal_steps else 1.0
        return {
            **batch,
            "own": np.arange(rows) < counts[DRAFT],
            "share": np.full(rows, share, np.float32),
        }

    def loss(self, params: Any, frozen: Any, batch: Any) -> tuple[Array, dict[str, Array]]:
        o = self.options
        if o.online:
            return self._online(params, frozen, batch)
        tokens = self._continue(params, batch) if o.draft_fraction else batch["tokens"]
        if o.loss == ACCEPTED_LENGTH:
            kl, ratio, alpha = self._rows(accepted.statistics, params, frozen, tokens, True)
            # The text of a window goes on behind an end of text, and a decoder does not.
            ends = jnp.isin(tokens[:, 1:], jnp.array(self.target.eos, jnp.int32))
            ratio = jnp.where(ends, 0, ratio)
            length, counts = accepted.expected_accepted_length(
                ratio, alpha, batch["drawn"], batch["limit"], o.num_drafts
            )
            weight = counts.sum()
            refused = 1 - length / o.num_drafts
            share = batch["share"][:, None]
            each = (
                share * refused + (1 - share) * kl[:, : refused.shape[1]]
                if o.anneal_steps
                else refused
            )
            mean = jnp.sum(counts * each) / jnp.maximum(weight, 1)
            found = jnp.sum(counts * length) / jnp.maximum(weight, 1)
            return mean, {"weight": weight, "expected_accepted_length": found}
        weight = learned(batch["drawn"], o.learn_prompts).reshape(-1)
        hidden, rows = self._read(params, frozen, tokens)
        shared = (head_matrix(frozen), self.serving, self._share(batch))
        total = chunked(against(DIVERGENCES[o.loss]))(
            hidden, head_matrix(params), (weight, rows), shared
        )
        return total / jnp.maximum(weight.sum(), 1), {"weight": weight.sum()}

    def _share(self, batch: Any) -> Array | None:
        return batch["share"][0] if self.options.anneal_steps else None

    def _read(self, params: Any, frozen: Any, tokens: Array) -> tuple[Array, Array]:
        """Features [B * T, E] of draft and target."""
        inputs = tokens[:, :-1]
        target = read(self.reader, frozen, inputs, self.end)
        return read(self.draft, params, inputs, self.end), jax.lax.stop_gradient(target)

    def _rows(
        self, statistics: Any, params: Any, frozen: Any, tokens: Array, labelled: bool
    ) -> Any:
        """Numbers of every token, each [B, T]."""
        hidden, target = self._read(params, frozen, tokens)
        rows = (tokens[:, 1:].reshape(-1), target) if labelled else (target,)
        shared = (head_matrix(frozen), self.serving)
        found = chunked_rows(statistics)(hidden, head_matrix(params), rows, shared)
        return jnp.moveaxis(found.reshape(len(tokens), -1, found.shape[-1]), -1, 0)

    def _keys(self, batch: Any) -> Array:
        return jax.vmap(lambda n: jax.random.fold_in(make_key(self.options.seed), n))(
            batch["number"]
        )

    def _prefill(self, decoder: Decoder, params: Params, batch: Any) -> Any:
        o, rows = self.options, len(batch["tokens"])
        return decoder.prefill(
            params, batch["tokens"][:, : o.sampled_prompt], np.full(rows, o.sampled_prompt, np.int32),
            limit=np.full(rows, decoder.capacity, np.int32), sampling=Sampling.create(rows, **o.settings),
            key=self._keys(batch),
        )  # fmt: skip

    def _continue(self, params: Any, batch: Any) -> Array:
        """The tokens of a batch, those of its `own` rows as the draft goes on now."""
        tokens, own = batch["tokens"], batch["own"]
        decoder = Decoder(self.draft, NoProposer(), Match(), (), tokens.shape[1])
        arrays = Params(jax.lax.stop_gradient(params))

        def write():
            written = decoder.run(arrays, self._prefill(decoder, arrays, batch)).tokens[
                :, : tokens.shape[1]
            ]
            return jnp.where(own[:, None], written, tokens)

        return jax.lax.cond(own.any(), write, lambda: tokens)

    def speculator(self, capacity: int, eos: tuple[int, ...] = ()) -> Decoder:
        size = self.target.model.vocab_size
        return Decoder(
            self.target.model,
            DraftModel(self.draft, size, self.options.num_drafts),
            Match(),
            eos,
            capacity,
        )

    def _online(self, params: Any, frozen: Any, batch: Any) -> tuple[Array, dict[str, Array]]:
        o = self.options
        decoder, arrays = (
            self.speculator(o.sequence_length),
            Params(frozen, jax.lax.stop_gradient(params)),
        )
        rollout = online.roll_out(
            decoder, arrays, self._prefill(decoder, arrays, batch), o.online_steps
        )
        hidden = online.read_branches(self.draft, params, rollout)

        def loss(logits, weight, target, share):
            divergence = blend(DIVERGENCES[o.loss], share)
            return jnp.sum(
                weight * divergence(jax.nn.log_softmax(target), log_draft(logits, self.serving))
            )

        target = rollout.logits.reshape(-1, rollout.logits.shape[-1])
        weight = jnp.ones(len(target))
        total = chunked(loss)(
            hidden.reshape(len(target), -1),
            head_matrix(params),
            (weight, target),
            (self._share(batch),),
        )
        tau = rollout.emitted.mean() / o.online_steps
        return total / len(target), {"online_tau": tau}

    @functools.cached_property
    def _measure(self):
        def mean(params, frozen, tokens, drawn, counted):
            weight = learned(drawn, self.options.learn_prompts) * counted[:, None]
            return (weight * self._rows(agreement, params, frozen, tokens, False)).sum(
                (1, 2)
            ) / weight.sum()

        return jax.jit(mean)

    def evaluate(self, params: Any) -> dict[str, float]:
        o = self.options
        found = []
        for i in range(o.eval_batches):
            batch = (
                *held_out_rows(self.held_out, i, _ROWS, o.sequence_length),
                np.ones(_ROWS, np.float32),
            )
            # Rows that fill up the mesh do not count: the same text is measured on every one.
            batch = lay_batch(filled(batch, row_parts(self.mesh)), self.mesh)
            found.append(to_host(self._measure(params, self.frozen, *batch)))
        kl, alpha, same = np.mean(found, axis=0)
        report = {
            "held_out_kl": float(kl),
            "held_out_alpha": float(alpha),
            "held_out_same_argmax": float(same),
        }
        if o.eval_prompts:
            longest = o.sequence_length - o.eval_tokens
            prompts = held_out_prompts(
                self.held_out, o.eval_prompts, o.sequence_length, o.sampled_prompt, longest
            )
            room = max(map(len, prompts)) + o.eval_tokens + o.num_drafts
            decoder = self.speculator(room, self.target.eos)
            report |= measure_tau(
                decoder, Params(self.frozen, params), prompts, o.eval_tokens, settings=o.settings
            )
        return report

    def show(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, and which of them are learned: for --show-mask."""
        if self.options.online:
            raise ValueError(
                "--show-mask: with --online the draft learns from guesses that are made in the step"
            )
        return batch["tokens"], np.asarray(learned(batch["drawn"], self.options.learn_prompts))

    def goal(self, report: dict[str, float]) -> float:
        """Measured acceptance, where it is measured: the loss can fall while it does, too."""
        return report.get("tau", -report["held_out_kl"])

    def export(self, params: Any, folder: pathlib.Path) -> None:
        # The target's ends: it may call them otherwise than corpora of text do, and have several.
        save_student(folder, self.draft, params, self.tokenizer, self.target.eos)


def filled(arrays: Any, parts: int) -> Any:
    """Arrays with rows of zeros behind, so that `parts` divides their number."""
    return jax.tree.map(
        lambda x: np.pad(x, ((0, -len(x) % parts), *((0, 0),) * (x.ndim - 1))), arrays
    )


def annealing(options: DistillOptions) -> int:
    """`--anneal-steps`, or its default: what the run began with; else most of a run from nothing
    whose loss is flat where draft and target share little; else none."""
    if options.anneal_steps is not None:
        return options.anneal_steps
    out = pathlib.Path(options.out)
    if any((out / "state").glob("[0-9]*")):
        return json.loads((out / "run.json").read_text())["options"]["anneal_steps"] or 0
    flat = options.loss in ("total-variation", ACCEPTED_LENGTH)
    return options.steps * 4 // 5 if flat and options.initial is None else 0


def main(argv: list[str] | None = None) -> None:
    options = parse(DistillOptions, argv, __doc__)
    options = dataclasses.replace(options, anneal_steps=annealing(options))
    if options.anneal_steps:
        over = f"--loss {options.loss} takes over from forward KL"
        print(f"{over} in the first {options.anneal_steps} steps (--anneal-steps)", flush=True)
    out, mesh = pathlib.Path(options.out), mesh_of_run(options)
    target = load(options.target, mesh=mesh, rules=TRAINING_RULES)
    check_initial(
        options, target.tokenizer, target.model.vocab_size, f"--target {options.target}",
        "a draft must share the target's tokens: pass one that was trained for this target",
    )  # fmt: skip
    exact = options.settings if options.loss == ACCEPTED_LENGTH else None
    found = gather(options, target, exact)
    written, needs_text = found.written, options.online or options.sampled_fraction < 1
    if needs_text and found.text is None:
        cure = "" if options.online else ", or pass --sampled-fraction 1"
        raise ValueError(
            "--data holds only sequences of prompts and answers"
            + ", and --online goes on from windows of text" * options.online
            + f": add a folder of text{cure}"
        )
    if (
        written is None
        and found.text is not None
        and options.sampled_fraction
        and not options.online
    ):
        sample(target, found.text, options, out / "sampled", model_hashes(options.target))
        rows = dataset.read_masked(out / "sampled", model_hashes(options.target))
        written = Written.of(rows, options.sequence_length)
    if written is not None and options.loss == ACCEPTED_LENGTH:
        written = with_starts(written, options.num_drafts)
    draft = make_model(options, target.model.vocab_size)
    sizes = {
        "target": target.num_params,
        "draft": sum(
            x.size for x in jax.tree.leaves(jax.eval_shape(draft.init, jax.random.key(0)))
        ),
    }
    print(f"parameters: {json.dumps(sizes)}", flush=True)
    assert target.tokenizer is not None
    end = starts_of_documents(target.tokenizer, options.isolate_documents)
    fit(
        Distill(
            options, draft, target, found.text, found.held_out, written, end, found.inputs, mesh
        ),
        options,
    )


if __name__ == "__main__":
    run(main)
