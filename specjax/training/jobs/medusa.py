"""python -m train.medusa: heads on a target's features learn the tokens further ahead.

The target reads a batch once, and every head learns from its features.  It stays as it is ("Medusa-1"), or with
--lora-rank learns beside them ("Medusa-2"): its own next token, as the data have it or (--self-distil) as it said
before, so that the heads can have features that tell more.  Then the result is two folders, `model/target`, a model
like any other, and `model/heads`; and lossless means what that target says.

At the end the target writes a few texts greedily; how they rank among the guesses decides which tree of choices is
saved with the heads.
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

from specjax.decoding import Decoder
from specjax.drafters import MedusaAdapter
from specjax.files import load, load_medusa, save, save_medusa
from specjax.models import LanguageModel, LinenModel, MedusaHeads, head_matrix, medusa_features
from specjax.parallel import TRAINING_RULES, hold, layout, module_shardings, put, row_parts, to_host
from specjax.proposers import (
    MedusaParams,
    NoProposer,
    best_tree,
    expected_length,
    measure_ranks,
    node_acceptance,
)
from specjax.rules import Match
from specjax.sampling import Sampling, make_key
from specjax.training.corpus import TextOptions, starts_of_documents
from specjax.training.divergences import forward_kl
from specjax.training.loop import LoopOptions, fit
from specjax.training.lora import initial_lora, merge
from specjax.training.losses import against, chunked, cross_entropy
from specjax.training.material import Material, gather, held_out_prompts, held_out_rows, learned
from specjax.training.measure import measure_tau, pad
from specjax.training.mesh import lay_batch, mesh_of_run
from specjax.training.options import REQUIRED, above, at_least, matching, option, parse, run, within
from specjax.training.precision import mixed_dot_general
from specjax.training.recipes import PRESETS
from specjax.training.student import read
from specjax.types import Params


@dataclasses.dataclass(frozen=True)
class MedusaOptions(LoopOptions, TextOptions):
    """The target, the data, the heads' form, and the loop."""

    target: str = option(REQUIRED, "folder of the target")
    num_heads: int = option(4, "heads")
    num_layers: int = option(1, "residual blocks a head")
    own_heads: bool = option(
        False, "a linear map to the vocabulary for each head (version 1), not the target's"
    )
    head_decay: float = option(0.8, "weight of a head's loss, relative to the head before")
    soft: bool = option(False, "learn the target's distribution at each place, not the text")
    initial: str | None = option(
        None, "folder of heads of this form to go on from; without it, the target's own head"
    )
    lora_rank: int = option(
        0, "of the target's changes, which learn beside the heads; 0: the target stays"
    )
    lora_alpha: float = option(16.0, "the changes are multiplied by alpha / rank")
    heads_weight: float = option(0.2, "of the heads' loss beside the target's own")
    heads_ramp: str = option(
        "constant", "how that weight comes, at once or along a sine", choices=("constant", "sine")
    )
    head_rate: float = option(
        4.0, "the heads' learning rate over that of the changes, which --learning-rate says"
    )
    self_distil: bool = option(
        False, "hold the changed target to what it said before, not to the data"
    )
    isolate_documents: bool = option(
        False, "documents packed into a sequence do not see each other"
    )
    tree_nodes: int = option(16, "nodes of the tree of choices, the root included")
    written_sequences: int = option(
        32, "texts that the target writes, on which the tree is measured"
    )
    written_prompt: int = option(32, "tokens of held-out text that it continues")
    eval_batches: int = option(8, "held-out batches per evaluation")
    eval_prompts: int = option(
        0, "held-out prompts on which tau of a chain of guesses is measured, greedily; 0: none"
    )
    eval_tokens: int = option(64, "new tokens for each of them")
    learning_rate: float = option(1e-3, "peak learning rate of AdamW")
    warmup_steps: int = option(100, "steps of linear warm-up")
    weight_decay: float = option(0.0, "of AdamW")

    def __post_init__(self):
        super().__post_init__()
        at_least(
            self,
            1,
            "num_heads",
            "num_layers",
            "written_sequences",
            "written_prompt",
            "eval_batches",
        )
        at_least(self, 1, "eval_tokens")
        at_least(self, 0, "lora_rank", "eval_prompts", "heads_weight")
        above(self, 0, "lora_alpha", "head_rate")
        within(self, 0, 1, "head_decay")
        if self.self_distil and not self.lora_rank:
            raise ValueError(
                "--self-distil holds a changed target to its old self: pass --lora-rank, too"
            )
        if self.tree_nodes < 2:
            raise ValueError(
                f"--tree-nodes is {self.tree_nodes}; it counts the root too, so it must be at least 2"
            )
        if self.eval_prompts and self.written_prompt + self.eval_tokens > self.sequence_length:
            raise ValueError(
                f"--eval-tokens {self.eval_tokens} behind --written-prompt {self.written_prompt} are more than "
                f"--sequence-length {self.sequence_length}"
            )
        if self.sequence_length < self.written_prompt + self.num_heads + 2:
            raise ValueError(
                f"--sequence-length is {self.sequence_length}; a prompt of {self.written_prompt} tokens and "
                f"{self.num_heads} heads need {self.written_prompt + self.num_heads + 2} or more"
            )


def labels_ahead(tokens: Array, mask: Array, head: int) -> tuple[Array, Array]:
    """What head k (from 0) learns at the first T of the tokens [B, T + 1]: the token at t + 2 + k.

    Args:
      tokens: a batch.
      mask: [B, T] 1 where the token behind is learned.
      head: k.

    Returns:
      Labels [B, T], and weights [B, T]: 1, or 0 where that token is not learned, or the batch ends before.
    """
    labels = jnp.roll(tokens, -2 - head, axis=1)[:, :-1]
    inside = jnp.arange(labels.shape[1]) < labels.shape[1] - 1 - head
    return labels, inside * jnp.roll(mask, -1 - head, axis=1)


def _soft_cross_entropy(
    logits: Array, weight: Array, target_hidden: Array, target_head: Array
) -> Array:
    """Sum over rows of weight * cross-entropy of the target's distribution.  Shapes [C, V], [C], [C, E], [E, V]."""
    target = jax.nn.softmax(mixed_dot_general(target_hidden, target_head, (((1,), (0,)), ((), ()))))
    return -jnp.sum(weight * jnp.sum(target * jax.nn.log_softmax(logits), axis=1))


@dataclasses.dataclass(eq=False)
class TrainMedusa:
    """Cross-entropy of every head, a later one weighing less (Cai et al. 2024, arXiv 2401.10774, equation 1), and of a
    target that changes (equation 2).

    Parameters are those of the heads; or {"heads": ..., "lora": ...}.
    """

    options: MedusaOptions
    target: LanguageModel
    adapter: MedusaAdapter  # to begin with
    material: Material
    end: int | None = None  # the token that starts a document, where documents are isolated
    mesh: Mesh | None = None

    def __post_init__(self):
        self.frozen = self.target.params
        config = self.target.model.module.config
        self.reader = LinenModel(self.target.model.module.clone(dot_general=mixed_dot_general))
        self.heads: MedusaHeads = self.adapter.heads.clone(dot_general=mixed_dot_general)
        self.joint = self.options.lora_rank > 0
        self.tied = config.tied_embeddings
        self.rates = {"heads": self.options.head_rate, "lora": 1.0} if self.joint else None
        self.inputs, self.tokenizer = self.material.inputs, self.target.tokenizer

    def init(self) -> Any:
        heads, params = self.adapter.heads, self.adapter.params
        if self.mesh is None:
            made = jax.tree.map(jnp.copy, params)  # the loop donates them
        else:
            at = module_shardings(
                heads, self.mesh, TRAINING_RULES, jnp.zeros((1, heads.hidden_size))
            )
            made = jax.tree.map(put, to_host(params), at)
        return {"heads": made, "lora": self.changes()} if self.joint else made

    def changes(self) -> Any:
        """Those of the target, which are none yet."""
        o = self.options
        return initial_lora(self.frozen, o.lora_rank, self.tied, jax.random.key(o.seed))

    def batch(self, step: int) -> dict[str, np.ndarray]:
        o, text, written = self.options, self.material.text, self.material.written
        if written is not None:
            found = written.rows(step * o.batch_size, o.batch_size, o.seed)
            tokens, drawn = found.tokens, found.drawn
        else:
            assert text is not None
            tokens = text.batch(step, o.batch_size, o.sequence_length, o.seed)
            drawn = np.zeros((o.batch_size, o.sequence_length), np.float32)
        ramp = np.sin(np.pi / 2 * step / o.steps) if o.heads_ramp == "sine" else 1.0
        share = np.full(o.batch_size, o.heads_weight * ramp if self.joint else 1.0, np.float32)
        return {"tokens": tokens, "drawn": drawn, "share": share}

    def show(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, and which of them are learned, by whichever head: for --show-mask."""
        return batch["tokens"], np.asarray(learned(batch["drawn"]))

    def split(self, params: Any, frozen: Any) -> tuple[Any, Any]:
        """Parameters of the heads, and of the target as it is now."""
        if not self.joint:
            return params, frozen
        merged = merge(frozen, params["lora"], self.options.lora_alpha / self.options.lora_rank)
        return params["heads"], hold(merged, layout(frozen))

    def loss(self, params: Any, frozen: Any, batch: Any) -> tuple[Array, dict[str, Array]]:
        tokens, mask = batch["tokens"], learned(batch["drawn"])
        heads, target = self.split(params, frozen)
        hidden = read(self.reader, target, tokens[:, :-1], self.end)
        matrix = head_matrix(target)
        if not self.joint:
            hidden, matrix = jax.lax.stop_gradient((hidden, matrix))
        total, metrics = self._loss_of_heads(heads, hidden, matrix, tokens, mask)
        # All heads learn at about as many places as there are marked: so parts of a batch weigh as they do in it.
        metrics["weight"] = mask.sum()
        if not self.joint:
            return total, metrics
        own = self._loss_of_target(frozen, hidden, matrix, tokens, mask)
        return own + batch["share"][0] * total, {**metrics, "loss_target": own}

    def _loss_of_heads(
        self, heads: Any, hidden: Array, matrix: Array, tokens: Array, mask: Array
    ) -> tuple[Array, dict[str, Array]]:
        rows, length = mask.shape
        # Logits are computed a chunk at a time: here the heads stop before their linear map.
        features = medusa_features(self.heads.clone(own_heads=False), heads, hidden)
        total, metrics = jnp.float32(0), {}
        for k in range(self.heads.num_heads):
            labels, weight = labels_ahead(tokens, mask, k)
            size = jnp.maximum(weight.sum(), 1)
            own = heads["head"][k] if self.heads.own_heads else matrix
            if self.options.soft:
                # The distribution of the token at t + 2 + k comes from the features at t + 1 + k.
                ahead = jnp.roll(hidden.reshape(rows, length, -1), -1 - k, axis=1).reshape(
                    hidden.shape
                )
                loss = chunked(_soft_cross_entropy)(
                    features[:, k], own, (weight.reshape(-1), ahead), (matrix,)
                )
            else:
                loss = chunked(cross_entropy)(
                    features[:, k], own, (weight.reshape(-1), labels.reshape(-1))
                )
            metrics[f"loss_head_{k}"] = loss / size
            total = total + self.options.head_decay**k * loss / size
        return total, metrics

    def _loss_of_target(
        self, frozen: Any, hidden: Array, matrix: Array, tokens: Array, mask: Array
    ) -> Array:
        weight = mask.reshape(-1)
        if self.options.self_distil:
            before = read(self.reader, frozen, tokens[:, :-1], self.end)
            total = chunked(against(forward_kl))(
                hidden, matrix, (weight, before), (head_matrix(frozen),)
            )
        else:
            total = chunked(cross_entropy)(hidden, matrix, (weight, tokens[:, 1:].reshape(-1)))
        return total / jnp.maximum(weight.sum(), 1)

    def _ranks(self, heads: Any, target: Any, texts: np.ndarray) -> np.ndarray:
        """[B, T - 1 - K, K]."""
        texts = lay_batch(texts, self.mesh)
        found = measure_ranks(self.reader, target, self.heads, heads, head_matrix(target), texts)
        return found.reshape(len(texts), -1, self.heads.num_heads)

    def _held_out_ranks(self, heads: Any, target: Any) -> np.ndarray:
        """[places, K], where all that the heads guess is learned."""
        o, found = self.options, []
        for i in range(o.eval_batches):
            tokens, drawn = held_out_rows(
                self.material.held_out, i, o.batch_size, o.sequence_length
            )
            ranks = self._ranks(heads, target, tokens[:, :-1])
            windows = np.lib.stride_tricks.sliding_window_view(
                np.asarray(learned(drawn))[:, 1:-1], o.num_heads, axis=1
            )
            found.append(ranks[windows.all(2)])
        ranks = np.concatenate(found)
        if not len(ranks):
            raise ValueError(
                f"no held-out answer has the {o.num_heads + 1} tokens that {o.num_heads} heads guess at"
            )
        return ranks

    def evaluate(self, params: Any) -> dict[str, float]:
        o = self.options
        heads, target = self.split(params, self.frozen)
        ranks = self._held_out_ranks(heads, target)
        report = {
            f"held_out_top1_head_{k}": float((ranks[:, k] == 0).mean()) for k in range(o.num_heads)
        }
        report["held_out_length"] = expected_length(ranks, best_tree(ranks, o.tree_nodes))
        if o.eval_prompts:
            # A chain, and not the tree of the moment: that would be another program each time.
            arrays = jax.tree.map(lambda leaf: leaf[None], heads)
            key = "head" if "head" in target else "embedding"
            params = Params(target, MedusaParams(arrays, jnp.int32(0), {key: target[key]}))
            prompts = self._prompts(o.eval_prompts, o.sequence_length - o.eval_tokens)
            room = max(map(len, prompts)) + o.eval_tokens + o.num_heads + 1
            proposer = dataclasses.replace(self.adapter.proposer, choices=())
            decoder = Decoder(self.target.model, proposer, Match(), self.target.eos, room)
            report |= measure_tau(decoder, params, prompts, o.eval_tokens, {"temperature": 0.0})
        return report

    def goal(self, report: dict[str, float]) -> float:
        """Measured acceptance, where it is measured."""
        return report.get("tau", report["held_out_length"])

    def export(self, params: Any, folder: pathlib.Path) -> None:
        heads, target = self.split(params, self.frozen)
        texts, starts = self._write(target)
        ranks = self._ranks(heads, target, texts)
        # Nothing of the prompts, which others wrote.
        ranks = ranks[np.arange(ranks.shape[1]) >= starts[:, None]]
        choices = best_tree(ranks, self.options.tree_nodes)
        acceptance = tuple(node_acceptance(ranks, choices)[1:].tolist())
        print(
            f"greedy text: {expected_length(ranks, choices):.3f} tokens a pass by the choices {choices}",
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

    def _prompts(self, count: int, longest: int) -> list[list[int]]:
        o = self.options
        return held_out_prompts(
            self.material.held_out, count, o.sequence_length, o.written_prompt, longest
        )

    def _write(self, target: Any) -> tuple[np.ndarray, np.ndarray]:
        """[written_sequences, sequence_length] tokens, held-out prompts that the target continues greedily; and how
        long [written_sequences] the prompts are.  On a mesh there are as many more as divide its rows."""
        o, parts = self.options, row_parts(self.mesh)
        length, rows = o.sequence_length, -(-o.written_sequences // parts) * parts
        prompts, lengths = pad(self._prompts(rows, length - o.num_heads - 2), length)
        decoder = Decoder(self.target.model, NoProposer(), Match(), (), length)
        params = Params(target)
        state = decoder.prefill(
            params, prompts[:, : lengths.max()], lengths, limit=np.full(rows, length, np.int32),
            sampling=Sampling.create(rows, 0.0), key=jax.random.split(make_key(0), rows),
        )  # fmt: skip
        return to_host(decoder.run(params, state).tokens)[:, :length], lengths


def first_adapter(options: MedusaOptions, target: LanguageModel) -> MedusaAdapter:
    """Untrained heads, or those of `--initial`.

    Raises:
      ValueError: these have another form, or another target.
    """
    made = MedusaAdapter.create(
        target, options.num_heads, num_layers=options.num_layers, own_heads=options.own_heads
    )
    if options.initial is None:
        return made
    found = load_medusa(options.initial, target)
    form = ("num_heads", "num_layers", "own_heads")
    matching(options, found.heads, f"--initial {options.initial}", *form)
    return dataclasses.replace(made, params=found.params)


def main(argv: list[str] | None = None) -> None:
    options = parse(MedusaOptions, argv, __doc__, PRESETS)
    mesh = mesh_of_run(options)
    target = load(options.target, mesh=mesh, rules=TRAINING_RULES)
    material = gather(options, target)
    if material.text is not None and material.written is not None:
        raise ValueError(
            "--data holds text, and sequences with answers: heads learn from one of the two"
        )
    assert target.tokenizer is not None
    end = starts_of_documents(target.tokenizer, options.isolate_documents)
    job = TrainMedusa(options, target, first_adapter(options, target), material, end, mesh)
    parts = {
        "heads": job.adapter.params,
        **({"lora": jax.eval_shape(job.changes)} if job.joint else {}),
    }
    counts = {
        name: sum(leaf.size for leaf in jax.tree.leaves(part)) for name, part in parts.items()
    }
    print(f"parameters: {json.dumps({'target': target.num_params, **counts})}", flush=True)
    fit(job, options)


if __name__ == "__main__":
    run(main)
