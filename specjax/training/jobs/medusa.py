"""specjax train medusa: train heads that predict later tokens from a target's hidden states.

The target reads each batch once, and all heads learn from its last hidden states.  It stays frozen
("Medusa-1"), or with --lora-rank it is trained together with the heads ("Medusa-2"), on the data or
(--self-distil) to match its own original distribution.  Medusa-2 writes two folders: the changed
target in `model/target`, and `model/heads`.  Decoding is then lossless relative to that target.

At the end the target writes a few texts greedily.  The ranks that the heads give to these tokens
decide which tree of choices is saved with the heads.

With --teacher the heads learn from the hidden states that train.teacher has recorded, and the tree
is measured on recorded answers, or else on held-out text.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax import Array
from jax.sharding import Mesh

from specjax.contract import Arrays, Model
from specjax.decoding import Decoder
from specjax.files import save
from specjax.methods import (
    MedusaAdapter,
    MedusaHeads,
    MedusaParams,
    load_medusa,
    measure_ranks,
    medusa_hidden,
    save_medusa,
)
from specjax.models import LanguageModel, LinenModel, attend, from_function, head_matrix
from specjax.options.command import parse, run
from specjax.options.fields import matching
from specjax.parallel import (
    TRAINING_RULES,
    constrain_like,
    layout,
    module_shardings,
    put,
    row_parts,
    to_host,
)
from specjax.proposers import NoProposer, best_tree, expected_length, node_acceptance
from specjax.rules import Match
from specjax.sampling import Sampling, make_key
from specjax.training.corpus import starts_of_documents
from specjax.training.dataset import initial_hash
from specjax.training.divergences import forward_kl
from specjax.training.jobs.medusa_options import MedusaOptions
from specjax.training.lock import alone
from specjax.training.loop import fit
from specjax.training.lora import initial_lora, merge
from specjax.training.losses import Teacher, against, chunked, cross_entropy, with_cap
from specjax.training.material import Material, gather, held_out_prompts, learned, mixed, rows_of
from specjax.training.measure import measure_tau, pad
from specjax.training.mesh import lay_batch, mesh_of_run
from specjax.training.ordering import Rows
from specjax.training.precision import mixed_dot_general
from specjax.training.record import named
from specjax.training.recorded import STATES, Recorded
from specjax.training.recordings import open_teacher, share_of_answers, target_of
from specjax.training.student import read
from specjax.training.targets import fitted, load_target
from specjax.types import Params

Batch = Mapping[str, Array]
"""A batch of `TrainMedusa.batch`, as the traced loss sees it."""


def labels_ahead(tokens: Array, mask: Array, head: int) -> tuple[Array, Array]:
    """Returns the labels of head k (from 0): at position t it learns the token at t + 2 + k.

    Args:
      tokens: [B, T + 1] a batch.
      mask: [B, T] 1 where the next token is learned.
      head: k.

    Returns:
      Labels [B, T], and weights [B, T]: 1, or 0 where the label is not learned or lies beyond the
      batch.
    """
    labels = jnp.roll(tokens, -2 - head, axis=1)[:, :-1]
    inside = jnp.arange(labels.shape[1]) < labels.shape[1] - 1 - head
    return labels, inside * jnp.roll(mask, -1 - head, axis=1)


def _soft_cross_entropy(
    logits: Array, weight: Array, target_hidden: Array, teacher: Teacher
) -> Array:
    """Returns the sum over rows of weight * cross-entropy against the target's distribution.

    Shapes [C, V], [C], [C, E].
    """
    target = jax.nn.softmax(teacher.logits(target_hidden))
    return -jnp.sum(weight * jnp.sum(target * jax.nn.log_softmax(logits), axis=1))


@dataclasses.dataclass(eq=False)
class TrainMedusa:
    """Trains Medusa heads, by themselves or together with their target.

    The loss is the cross-entropy of every head, where later heads have less weight (Cai et al.
    2024, arXiv 2401.10774, equation 1), plus the target's own loss if it is trained too (equation
    2).  The parameters are those of the heads, or {"heads": ..., "lora": ...} with --lora-rank.
    """

    options: MedusaOptions
    target: LanguageModel
    adapter: MedusaAdapter  # the initial heads
    material: Material
    end: int | None = None  # the token that starts a document, if documents are isolated; else None
    mesh: Mesh | None = None

    def __post_init__(self):
        self.frozen: Arrays = self.target.params
        config = self.target.model.module.config
        self.reader = LinenModel(
            self.target.model.module.clone(dot_general=mixed_dot_general, attend=attend)
        )
        self.heads: MedusaHeads = self.adapter.heads.clone(dot_general=mixed_dot_general)
        self.joint = self.options.lora_rank > 0
        self.tied, self.cap = config.tied_embeddings, config.logit_softcap
        self.rates = {"heads": self.options.head_rate, "lora": 1.0} if self.joint else None
        self.inputs = {**self.material.inputs, **initial_hash(self.options.initial)}
        self.tokenizer: tokenizers.Tokenizer | None = self.target.tokenizer

    def init(self) -> Arrays:
        heads, params = self.adapter.heads, self.adapter.params
        if self.mesh is None:
            made = jax.tree.map(jnp.copy, params)  # a copy, because the loop donates its state
        else:
            at = module_shardings(
                heads, self.mesh, TRAINING_RULES, jnp.zeros((1, heads.hidden_size))
            )
            made = jax.tree.map(put, to_host(params), at)
        return {"heads": made, "lora": self.changes()} if self.joint else made

    def changes(self) -> dict[str, dict[str, Array]]:
        """Returns the initial LoRA of the target: a change of zero."""
        o = self.options
        return initial_lora(self.frozen, o.lora_rank, self.tied, jax.random.key(o.seed))

    def batch(self, step: int) -> dict[str, np.ndarray]:
        o = self.options
        ramp = np.sin(np.pi / 2 * step / o.steps) if o.heads_ramp == "sine" else 1.0
        share = np.full(o.batch_size, o.heads_weight * ramp if self.joint else 1.0, np.float32)
        return {**self.batches[step], "share": share}

    @functools.cached_property
    def batches(self) -> Rows:
        """Returns the rows of each step."""
        o, material = self.options, self.material
        share = 0.0 if material.written is None else 1.0
        return mixed(
            material.text, material.written, o.sequence_length, o.batch_size, o.seed, share
        )

    def show(self, batch: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens, and which of them any head learns, for --show-mask."""
        return batch["tokens"], np.asarray(learned(batch["drawn"]))

    def split(self, params: Arrays, frozen: Arrays) -> tuple[Arrays, Arrays]:
        """Returns the parameters of the heads, and those of the target with its LoRA merged."""
        if not self.joint:
            return params, frozen
        merged = merge(frozen, params["lora"], self.options.lora_alpha / self.options.lora_rank)
        return params["heads"], constrain_like(merged, layout(frozen))

    def hidden(self, target: Arrays, batch: Batch) -> Array:
        """Returns the target's last hidden states [B * T, E]."""
        return read(self.reader, target, batch["tokens"][:, :-1], self.end)

    def loss(self, params: Arrays, frozen: Arrays, batch: Batch) -> tuple[Array, dict[str, Array]]:
        tokens, mask = batch["tokens"], learned(batch["drawn"])
        heads, target = self.split(params, frozen)
        hidden = self.hidden(target, batch)
        matrix = head_matrix(target)
        if not self.joint:
            hidden, matrix = jax.lax.stop_gradient((hidden, matrix))
        total, metrics = self._loss_of_heads(heads, hidden, matrix, tokens, mask)
        # Each head learns about mask.sum() tokens: --accumulate weighs parts of a batch by it.
        metrics["weight"] = mask.sum()
        if not self.joint:
            return total, metrics
        own = self._loss_of_target(frozen, hidden, matrix, tokens, mask)
        return own + batch["share"][0] * total, {**metrics, "loss_target": own}

    def _loss_of_heads(
        self, heads: Arrays, hidden: Array, matrix: Array, tokens: Array, mask: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Returns the weighted sum of the heads' losses, and the loss of each."""
        rows, length = mask.shape
        # `chunked` applies the linear map, so that the logits never exist all at once.
        heads_hidden = medusa_hidden(self.heads.clone(own_heads=False), heads, hidden)
        total, metrics = jnp.float32(0), {}
        for k in range(self.heads.num_heads):
            labels, weight = labels_ahead(tokens, mask, k)
            size = jnp.maximum(weight.sum(), 1)
            own = heads["head"][k] if self.heads.own_heads else matrix
            if self.options.soft:
                # The target predicts the token at t + 2 + k from its hidden state at t + 1 + k.
                ahead = jnp.roll(hidden.reshape(rows, length, -1), -1 - k, axis=1)
                ahead = ahead.reshape(hidden.shape)
                loss = chunked(with_cap(_soft_cross_entropy, self.heads.logit_softcap))(
                    heads_hidden[:, k],
                    own,
                    (weight.reshape(-1), ahead),
                    (Teacher(matrix, self.cap),),
                )
            else:
                loss = chunked(with_cap(cross_entropy, self.heads.logit_softcap))(
                    heads_hidden[:, k], own, (weight.reshape(-1), labels.reshape(-1))
                )
            metrics[f"loss_head_{k}"] = loss / size
            total = total + self.options.head_decay**k * loss / size
        return total, metrics

    def _loss_of_target(
        self, frozen: Arrays, hidden: Array, matrix: Array, tokens: Array, mask: Array
    ) -> Array:
        """Returns the target's loss on the data, or with --self-distil against the original."""
        weight = mask.reshape(-1)
        if self.options.self_distil:
            before = read(self.reader, frozen, tokens[:, :-1], self.end)
            total = chunked(with_cap(against(forward_kl), self.cap))(
                hidden, matrix, (weight, before), (Teacher(head_matrix(frozen), self.cap),)
            )
        else:
            loss = with_cap(cross_entropy, self.cap)
            total = chunked(loss)(hidden, matrix, (weight, tokens[:, 1:].reshape(-1)))
        return total / jnp.maximum(weight.sum(), 1)

    def _ranks(self, heads: Arrays, target: Arrays, texts: np.ndarray) -> np.ndarray:
        """Returns the ranks [B, T - 1 - K, K] that K heads give to the tokens of texts [B, T]."""
        texts = lay_batch(texts, self.mesh)
        ranks = measure_ranks(self.reader, target, self.heads, heads, head_matrix(target), texts)
        return ranks.reshape(len(texts), -1, self.heads.num_heads)

    def held_out(self, index: int, heads: Arrays, target: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """Returns `drawn` [B, T] and ranks [B, T - 1 - K, K] of a held-out batch."""
        o = self.options
        rows = rows_of(self.material.held_out, o.sequence_length, 0).batch(o.batch_size)[index]
        return rows["drawn"], self._ranks(heads, target, rows["tokens"][:, :-1])

    def held_out_ranks(self, heads: Arrays, target: Arrays) -> np.ndarray:
        """Returns ranks [M, K] at held-out positions where every head's label is a learned token.

        Raises:
          ValueError: no such position exists.
        """
        o, parts = self.options, []
        for i in range(o.eval_batches):
            drawn, ranks = self.held_out(i, heads, target)
            parts.append(ranks[self.learned_windows(drawn)])
        ranks = np.concatenate(parts)
        if not len(ranks):
            raise ValueError(
                f"no held-out answer has the {o.num_heads + 1} tokens that {o.num_heads} heads need"
            )
        return ranks

    def learned_windows(self, drawn: np.ndarray) -> np.ndarray:
        """Returns [B, T - 1 - K], True where every head's label is learned, for `drawn` [B, T]."""
        windows = np.lib.stride_tricks.sliding_window_view(
            np.asarray(learned(drawn))[:, 1:-1], self.options.num_heads, axis=1
        )
        return np.asarray(windows.all(2))

    def evaluate(self, params: Arrays) -> dict[str, float]:
        o = self.options
        heads, target = self.split(params, self.frozen)
        ranks = self.held_out_ranks(heads, target)
        report = {
            f"held_out_top1_head_{k}": float((ranks[:, k] == 0).mean()) for k in range(o.num_heads)
        }
        report["held_out_length"] = expected_length(ranks, best_tree(ranks, o.tree_nodes))
        if o.eval_prompts:
            # Measured on a chain: the best tree changes, and each tree would compile a new program.
            arrays = jax.tree.map(lambda leaf: leaf[None], heads)
            key = "head" if "head" in target else "embedding"
            params = Params(target, MedusaParams(arrays, jnp.int32(0), {key: target[key]}))
            prompts = self._prompts(o.eval_prompts, o.sequence_length - o.eval_tokens)
            room = max(map(len, prompts)) + o.eval_tokens + o.num_heads + 1
            proposer = dataclasses.replace(self.adapter.proposer, choices=())
            decoder = Decoder(self.target.model, proposer, Match(), self.target.eos, room)
            report |= measure_tau(decoder, params, prompts, o.eval_tokens, {"temperature": 0.0})
        return report

    @property
    def facts(self) -> dict[str, Any]:
        o, config = self.options, self.target.model.module.config
        models = {
            "target": named(o.words, config, self.target.num_params),
            "heads": named(o.initial, self.heads, self.adapter.params),
        }
        return {"models": models}

    def goal(self, report: dict[str, float]) -> float:
        """Returns tau where it is measured; else the expected length of the best tree."""
        return report.get("tau", report["held_out_length"])

    def export(self, params: Arrays, folder: pathlib.Path) -> None:
        heads, target = self.split(params, self.frozen)
        ranks, text = self.drafted(heads, target)
        choices = best_tree(ranks, self.options.tree_nodes)
        acceptance = tuple(node_acceptance(ranks, choices)[1:].tolist())
        print(
            f"{text}: {expected_length(ranks, choices):.3f} tokens per pass with the choices "
            f"{choices}",
            flush=True,
        )
        adapter = dataclasses.replace(
            self.adapter, params=heads, choices=choices, acceptance=acceptance
        )
        if not self.joint:
            save_medusa(folder, adapter, self.target.name, jnp.bfloat16)
            return
        changed = dataclasses.replace(
            self.target, params=target, name=f"{self.target.name}-medusa-2"
        )
        save(changed, folder / "target", dtype=jnp.bfloat16)
        save_medusa(folder / "heads", adapter, changed.name, jnp.bfloat16)

    def drafted(self, heads: Arrays, target: Arrays) -> tuple[np.ndarray, str]:
        """Returns ranks [M, K] at the positions of drafts, and the name of the text."""
        texts, starts = self._write(target)
        ranks = self._ranks(heads, target, texts)
        # Heads draft after a prompt, so only ranks of tokens of the target are counted.
        return ranks[np.arange(ranks.shape[1]) >= starts[:, None]], "greedy text"

    def _prompts(self, count: int, longest: int) -> list[list[int]]:
        o = self.options
        return held_out_prompts(
            self.material.held_out, count, o.sequence_length, o.written_prompt, longest
        )

    def _write(self, target: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """Lets the target continue held-out prompts greedily.

        On a mesh the number of sequences is rounded up to a multiple of its row parts.

        Returns:
          Tokens [written_sequences, sequence_length], and the prompts' lengths [written_sequences].
        """
        o, parts = self.options, row_parts(self.mesh)
        length, rows = o.sequence_length, -(-o.written_sequences // parts) * parts
        prompts, lengths = pad(self._prompts(rows, length - o.num_heads - 2), length)
        decoder = Decoder(self.target.model, NoProposer(), Match(), (), length)
        params = Params(target)
        state = decoder.prefill(
            params,
            prompts[:, : lengths.max()],
            lengths,
            limit=np.full(rows, length, np.int32),
            sampling=Sampling.create(rows, 0.0),
            key=jax.random.split(make_key(0), rows),
        )
        return to_host(decoder.run(params, state).tokens)[:, :length], lengths


@dataclasses.dataclass(eq=False)
class RecordedMedusa(TrainMedusa):
    """Trains Medusa heads with the recorded hidden states of a target, which stays as it is."""

    teacher: Recorded = dataclasses.field(kw_only=True)
    share: float = dataclasses.field(kw_only=True)  # of the sequences with answers

    @functools.cached_property
    def batches(self) -> Rows:
        o = self.options
        return self.teacher.batches(o.batch_size, self.share, o.seed)

    def hidden(self, target: Arrays, batch: Batch) -> Array:
        states = batch[STATES].astype(jnp.float32)
        return states.reshape(-1, states.shape[-1])

    def held_out(self, index: int, heads: Arrays, target: Arrays) -> tuple[np.ndarray, np.ndarray]:
        rows = self.options.batch_size
        made = self.teacher.held_out(index * rows, rows)
        return made["drawn"], self._recorded_ranks(heads, target, made)

    def drafted(self, heads: Arrays, target: Arrays) -> tuple[np.ndarray, str]:
        """Returns ranks of recorded answers that the target may have generated, else of text."""
        text, answers, _ = self.teacher.request.counts
        if not answers:
            return self.held_out_ranks(heads, target), "held-out text"
        most = min(answers, self.options.written_sequences)
        made = self.teacher.rows(list(range(text, text + most)))
        ranks = self._recorded_ranks(heads, target, made)
        return ranks[self.learned_windows(made["drawn"])], "recorded answers"

    def _recorded_ranks(
        self, heads: Arrays, target: Arrays, made: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Returns the ranks [B, T - 1 - K, K] of a batch."""
        tokens = made["tokens"][:, :-1]
        states = jnp.asarray(made[STATES], jnp.float32)
        matrix = head_matrix(target)
        ranks = measure_ranks(self._said, states, self.heads, heads, matrix, tokens)
        return ranks.reshape(len(tokens), -1, self.heads.num_heads)

    @functools.cached_property
    def _said(self) -> Model:
        """Returns a model that returns the hidden states it is given; its logits are not used."""
        size = self.target.model.vocab_size

        def said(states: Array, tokens: Array) -> tuple[Array, Array]:
            return jnp.zeros((*tokens.shape, size)), states

        return from_function(said, vocab_size=size, max_positions=self.options.sequence_length)


def first_adapter(options: MedusaOptions, target: LanguageModel) -> MedusaAdapter:
    """Returns untrained heads, or those of `--initial`.

    Raises:
      ValueError: the heads in `--initial` have another shape or another target.
    """
    made = MedusaAdapter.create(
        target, options.num_heads, num_layers=options.num_layers, own_heads=options.own_heads
    )
    if options.initial is None:
        return made
    loaded = load_medusa(options.initial, target)
    shape = ("num_heads", "num_layers", "own_heads")
    matching(options, loaded.heads, f"--initial {options.initial}", *shape)
    return dataclasses.replace(made, params=loaded.params)


def main(argv: list[str] | None = None) -> None:
    options = parse(MedusaOptions, argv, __doc__)
    with alone(options.out, writes=not options.show_mask):
        job = make_job(options)
        fit(job, job.options)


def make_job(options: MedusaOptions) -> TrainMedusa:
    """Loads and reads what the options name, for `fit` or for a loop of one's own.

    Raises:
      ValueError: options, models and data do not fit together.
    """
    options.check_source()
    mesh = mesh_of_run(options)
    job = _recorded(options, mesh) if options.teacher else _beside_target(options, mesh)
    parts: dict[str, Arrays] = {"heads": job.adapter.params}
    if job.joint:
        parts["lora"] = jax.eval_shape(job.changes)
    counts = {name: sum(x.size for x in jax.tree.leaves(part)) for name, part in parts.items()}
    print(f"parameters: {json.dumps({'target': job.target.num_params, **counts})}", flush=True)
    return job


def _beside_target(options: MedusaOptions, mesh: Mesh | None) -> TrainMedusa:
    """Returns a job whose target is in memory."""
    target = load_target(options, "float32", mesh)
    options = fitted(options, target)
    material = gather(options, target)
    if material.text is not None and material.written is not None:
        raise ValueError(
            "--data holds both text and sequences with answers: heads learn from one kind only"
        )
    assert target.tokenizer is not None
    end = starts_of_documents(target.tokenizer, options.isolate_documents)
    return TrainMedusa(options, target, first_adapter(options, target), material, end, mesh)


def _recorded(options: MedusaOptions, mesh: Mesh | None) -> TrainMedusa:
    """Returns a job that learns from a recording."""
    teacher = open_teacher(options, options.isolate_documents, (STATES,))
    target = target_of(teacher, options, mesh, whole=bool(options.eval_prompts))
    inputs = {**teacher.request.hashes, "teacher": teacher.hash}
    material = Material(None, None, teacher.held_out_rows(), inputs)
    return RecordedMedusa(
        options, target, first_adapter(options, target), material, None, mesh,
        teacher=teacher, share=share_of_answers(None, teacher),
    )  # fmt: skip


if __name__ == "__main__":
    run(main)
