"""python -m train.medusa: heads on a frozen target's features learn the tokens further ahead.

The target reads a batch once, and every head learns from its features.  At the end the target writes a few texts
greedily; how they rank among the guesses decides which tree of choices is saved with the heads.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from specjax.bank import MedusaAdapter
from specjax.checkpoint import LanguageModel, load
from specjax.decoding import Decoder
from specjax.hub import find_folder
from specjax.medusa_files import save_medusa
from specjax.models.base import LinenModel
from specjax.models.medusa import MedusaHeads, medusa_features
from specjax.models.transformer import Transformer, head_matrix
from specjax.proposers import NoProposer
from specjax.proposers.choices import best_tree, expected_length, measure_ranks, node_acceptance
from specjax.rules import Match
from specjax.sampling import Sampling
from specjax.sharding import TRAINING_RULES, module_shardings, put, row_parts, to_host
from specjax.types import Params
from train.corpus import TextOptions, Tokens, prepare, starts_of_documents
from train.dataset import model_hashes
from train.loop import LoopOptions, fit
from train.losses import chunked, cross_entropy
from train.mesh import lay_batch, mesh_of_run
from train.options import REQUIRED, at_least, option, parse, run
from train.precision import mixed_dot_general
from train.student import read


@dataclasses.dataclass(frozen=True)
class MedusaOptions(LoopOptions, TextOptions):
    """The target, the data, the heads' form, and the loop."""

    target: str = option(REQUIRED, "folder of the target")
    num_heads: int = option(4, "heads")
    num_layers: int = option(1, "residual blocks a head")
    own_heads: bool = option(False, "a linear map to the vocabulary for each head (version 1), not the target's")
    head_decay: float = option(0.8, "weight of a head's loss, relative to the head before")
    soft: bool = option(False, "learn the target's distribution at each place, not the text")
    isolate_documents: bool = option(False, "documents packed into a sequence do not see each other")
    tree_nodes: int = option(16, "nodes of the tree of choices, the root included")
    written_sequences: int = option(32, "texts that the target writes, on which the tree is measured")
    written_prompt: int = option(32, "tokens of held-out text that it continues")
    eval_batches: int = option(8, "held-out batches per evaluation")
    learning_rate: float = option(1e-3, "peak learning rate of AdamW")
    warmup_steps: int = option(100, "steps of linear warm-up")
    weight_decay: float = option(0.0, "of AdamW")

    def __post_init__(self):
        super().__post_init__()
        at_least(self, 1, "num_heads", "num_layers", "written_sequences", "written_prompt", "eval_batches")
        if self.tree_nodes < 2:
            raise ValueError(f"--tree-nodes is {self.tree_nodes}; it counts the root too, so it must be at least 2")
        if self.sequence_length < self.written_prompt + self.num_heads + 2:
            raise ValueError(
                f"--sequence-length is {self.sequence_length}; a prompt of {self.written_prompt} tokens and "
                f"{self.num_heads} heads need {self.written_prompt + self.num_heads + 2} or more"
            )


def labels_ahead(batch: Array, head: int) -> tuple[Array, Array]:
    """What head k (from 0) learns at the tokens [B, T] of a batch [B, T + 1]: the token at t + 2 + k.

    Returns:
      Labels [B, T], and weights [B, T]: 1, or 0 where the batch ends before.
    """
    labels = jnp.roll(batch, -2 - head, axis=1)[:, :-1]
    inside = jnp.arange(labels.shape[1]) < labels.shape[1] - 1 - head
    return labels, jnp.broadcast_to(inside, labels.shape).astype(jnp.float32)


def _soft_cross_entropy(logits: Array, weight: Array, target_hidden: Array, target_head: Array) -> Array:
    """Sum over rows of weight * cross-entropy of the target's distribution.  Shapes [C, V], [C], [C, E], [E, V]."""
    target = jax.nn.softmax(mixed_dot_general(target_hidden, target_head, (((1,), (0,)), ((), ()))))
    return -jnp.sum(weight * jnp.sum(target * jax.nn.log_softmax(logits), axis=1))


@dataclasses.dataclass(eq=False)
class TrainMedusa:
    """Cross-entropy of every head, a later one weighing less (Cai et al. 2024, arXiv 2401.10774, "Medusa-1")."""

    options: MedusaOptions
    target: LanguageModel
    adapter: MedusaAdapter  # untrained
    train: Tokens
    held_out: Tokens
    inputs: dict[str, str]  # hashes of what is read
    end: int | None = None  # the token that starts a document, where documents are isolated
    mesh: Mesh | None = None

    def __post_init__(self):
        self.frozen = self.target.params
        self.reader = LinenModel(Transformer(self.target.model.module.config, mixed_dot_general))
        self.heads: MedusaHeads = self.adapter.heads.clone(dot_general=mixed_dot_general)

    def init(self) -> Any:
        if self.mesh is None:
            return jax.tree.map(jnp.copy, self.adapter.params)  # the loop donates them
        heads, params = self.adapter.heads, to_host(self.adapter.params)
        at = module_shardings(heads, self.mesh, TRAINING_RULES, jnp.zeros((1, heads.hidden_size)))
        return jax.tree.map(put, params, at)

    def batch(self, step: int) -> np.ndarray:
        o = self.options
        return self.train.batch(step, o.batch_size, o.sequence_length, o.seed)

    def loss(self, params: Any, frozen: Any, batch: Array) -> tuple[Array, dict[str, Array]]:
        rows, length = batch.shape[0], batch.shape[1] - 1
        hidden = jax.lax.stop_gradient(read(self.reader, frozen, batch[:, :-1], self.end))
        # Logits are computed a chunk at a time: here the heads stop before their linear map.
        features = medusa_features(self.heads.clone(own_heads=False), params, hidden)
        matrix = jax.lax.stop_gradient(head_matrix(frozen))
        total, metrics = jnp.float32(0), {}
        for k in range(self.heads.num_heads):
            labels, weight = labels_ahead(batch, k)
            size = jnp.maximum(weight.sum(), 1)
            own = params["head"][k] if self.heads.own_heads else matrix
            if self.options.soft:
                # The distribution of the token at t + 2 + k comes from the features at t + 1 + k.
                ahead = jnp.roll(hidden.reshape(rows, length, -1), -1 - k, axis=1).reshape(hidden.shape)
                loss = chunked(_soft_cross_entropy)(features[:, k], own, (weight.reshape(-1), ahead), (matrix,))
            else:
                loss = chunked(cross_entropy)(features[:, k], own, (weight.reshape(-1), labels.reshape(-1)))
            metrics[f"loss_head_{k}"] = loss / size
            total = total + self.options.head_decay**k * loss / size
        return total, metrics

    def _ranks(self, params: Any, texts: np.ndarray) -> np.ndarray:
        """[B, T - 1 - K, K]."""
        texts = lay_batch(texts, self.mesh)
        found = measure_ranks(self.reader, self.frozen, self.heads, params, head_matrix(self.frozen), texts)
        return found.reshape(len(texts), -1, self.heads.num_heads)

    def evaluate(self, params: Any) -> dict[str, float]:
        o = self.options
        batches = (self.held_out.batch(i, o.batch_size, o.sequence_length, 0)[:, :-1] for i in range(o.eval_batches))
        ranks = np.concatenate([self._ranks(params, batch) for batch in batches]).reshape(-1, o.num_heads)
        report = {f"held_out_top1_head_{k}": float((ranks[:, k] == 0).mean()) for k in range(o.num_heads)}
        return {**report, "held_out_length": expected_length(ranks, best_tree(ranks, o.tree_nodes))}

    def goal(self, report: dict[str, float]) -> float:
        return report["held_out_length"]

    def export(self, params: Any, folder: pathlib.Path) -> None:
        ranks = self._ranks(params, self._write())[:, self.options.written_prompt :].reshape(-1, self.heads.num_heads)
        choices = best_tree(ranks, self.options.tree_nodes)
        acceptance = tuple(node_acceptance(ranks, choices)[1:].tolist())
        print(f"greedy text: {expected_length(ranks, choices):.3f} tokens a pass by the choices {choices}", flush=True)
        adapter = dataclasses.replace(self.adapter, params=params, choices=choices, acceptance=acceptance)
        save_medusa(folder, adapter, self.target.name, jnp.bfloat16)

    def _write(self) -> np.ndarray:
        """[written_sequences, sequence_length] tokens: held-out text, continued greedily by the target."""
        o = self.options
        parts, prompt, length = row_parts(self.mesh), o.written_prompt, o.sequence_length
        rows = -(-o.written_sequences // parts) * parts
        decoder = Decoder(self.target.model, NoProposer(), Match(), (), length)
        params = Params(self.target.params)
        state = decoder.prefill(
            params, self.held_out.batch(0, rows, prompt - 1, 1), np.full(rows, prompt, np.int32),
            limit=np.full(rows, length, np.int32), sampling=Sampling.create(rows, 0.0),
            key=jax.random.split(jax.random.key(0), rows),
        )  # fmt: skip
        return to_host(decoder.run(params, state).tokens)[:, :length]


def main(argv: list[str] | None = None) -> None:
    options = parse(MedusaOptions, argv, __doc__)
    out = pathlib.Path(options.out)
    mesh = mesh_of_run(options)
    target = load(options.target, mesh=mesh, rules=TRAINING_RULES)
    if target.tokenizer is None:
        raise ValueError(f"--target {options.target} has no tokenizer.json, which tokenises --data")
    if options.sequence_length > target.model.max_positions:
        raise ValueError(
            f"--sequence-length is {options.sequence_length}; the target reads at most {target.model.max_positions}"
        )
    tokenizer = str(find_folder(options.target) / "tokenizer.json")
    _, train, held_out = prepare(options.source, out / "corpus", target.model.vocab_size, tokenizer)
    adapter = MedusaAdapter.create(
        target, options.num_heads, num_layers=options.num_layers, own_heads=options.own_heads
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(adapter.params))
    print(f"parameters: {json.dumps({'target': target.num_params, 'heads': count})}", flush=True)
    end = starts_of_documents(target.tokenizer, options.isolate_documents)
    inputs = {**train.inputs, **model_hashes(options.target)}
    fit(TrainMedusa(options, target, adapter, train, held_out, inputs, end, mesh), options)


if __name__ == "__main__":
    run(main)
