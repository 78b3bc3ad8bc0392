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
import pathlib
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax._internal.checks import settle
from specjax.contract import Cache, Model
from specjax.decoding import Decoder
from specjax.files import save
from specjax.measure import pad
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
from specjax.options.command import parse
from specjax.options.fields import count, matching, option
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
from specjax.training.divergences import forward_kl
from specjax.training.jobs.taught import TaughtJob
from specjax.training.lock import alone
from specjax.training.loop import fit
from specjax.training.lora import Lora, initial_lora, merge
from specjax.training.losses import Teacher, against, chunked, cross_entropy, with_cap
from specjax.training.material import gather, learned
from specjax.training.mesh import lay_batch
from specjax.training.ordering import Rows
from specjax.training.precision import mixed_dot_general
from specjax.training.record import named, num_params
from specjax.training.recorded import STATES, Recorded
from specjax.training.recordings import RecordedMaterial, TaughtOptions, opened, share_of_answers
from specjax.training.student import read
from specjax.training.trees import Batch, Row, Tree
from specjax.types import ArrayTree, Json, Params


@dataclasses.dataclass(frozen=True)
class MedusaOptions(TaughtOptions):
    """The target, the data, the shape of the heads, and the loop."""

    group = "heads"
    common = (
        "target", "data", "teacher", "mesh", "steps", "batch_size", "learning_rate",
        "optimizer", "out", "sequence_length", "seed", "eval_every", "save_every",
        "curves", "num_heads", "num_layers", "own_heads", "initial", "lora_rank",
        "self_distil", "tree_nodes", "eval_prompts",
    )  # fmt: skip

    prompt = "written_prompt"

    num_heads: int = count(4, "heads")
    num_layers: int = count(1, "residual blocks per head")
    own_heads: bool = option(
        False,
        "give each head its own linear map to the vocabulary (version 1) instead of the target's",
    )
    head_decay: float = option(
        0.8, "weight of a head's loss, relative to the head before", "[0, 1]"
    )
    soft: bool = option(False, "learn the target's distribution at each position, not the text")
    initial: str | None = option(
        None, "folder of heads of this shape to start from; default: untrained heads"
    )
    lora_rank: int = count(
        0, "rank of the LoRA that trains the target beside the heads; 0: the target stays frozen", 0
    )
    lora_alpha: float = option(16.0, "the LoRA is scaled by alpha / rank", "(0, inf)")
    heads_weight: float = option(
        0.2, "weight of the heads' loss relative to the target's own loss", "[0, inf)"
    )
    heads_ramp: str = option(
        "constant",
        "schedule of that weight: constant, or rising along a sine",
        choices=("constant", "sine"),
    )
    head_rate: float = option(
        4.0,
        "learning rate of the heads, as a multiple of --learning-rate (the rate of the LoRA)",
        "(0, inf)",
    )
    self_distil: bool = option(
        False, "train the target to match its own original distribution, not the data"
    )
    isolate_documents: bool = option(
        False, "tokens do not attend to other documents packed into the same sequence"
    )
    tree_nodes: int = option(
        16, "nodes of the tree of choices, including the root", "[2, inf): it counts the root too"
    )
    written_sequences: int = count(
        32, "texts that the target writes, on which the tree of choices is measured"
    )
    written_prompt: int = count(32, "tokens of held-out text that the target continues")
    learning_rate: float = option(1e-3, "peak learning rate", "(0, inf)")
    warmup_steps: int = count(100, "steps of linear warm-up", 0)
    weight_decay: float = option(0.0, "weight decay, on matrices only", "[0, inf)")

    def __post_init__(self):
        super().__post_init__()
        self.check_teacher({"--lora-rank": self.lora_rank}, {})
        least = self.written_prompt + self.num_heads + 2
        settle(
            (
                self.self_distil and not self.lora_rank,
                "--self-distil needs a target that is trained: pass --lora-rank, too",
            ),
            (
                self.sequence_length < least,
                f"--sequence-length is {self.sequence_length}; a prompt of {self.written_prompt} "
                f"tokens and {self.num_heads} heads need {least} or more",
            ),
        )


def labels_ahead(tokens: Array, mask: Array, head: int) -> tuple[Array, Array]:
    """Returns labels and weights [B, T] of head k (from 0), which learns the token at t + 2 + k.

    A token of `tokens` [B, T + 1] is learned where `mask` [B, T] is 1.  The weight of the others is
    0, and so is that of labels beyond the batch.
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
class TrainMedusa(TaughtJob[MedusaOptions]):
    """Trains Medusa heads, by themselves or together with their target.

    The loss is the cross-entropy of every head, where later heads have less weight (Cai et al.
    2024, arXiv 2401.10774, equation 1), plus the target's own loss if it is trained too (equation
    2).  The parameters are those of the heads, or {"heads": ..., "lora": ...} with --lora-rank.
    """

    adapter: MedusaAdapter  # the initial heads
    end: int | None = None  # the token that starts a document, if documents are isolated; else None

    def __post_init__(self):
        config = self.target.model.module.config
        self.reader = LinenModel(
            self.target.model.module.clone(dot_general=mixed_dot_general, attend=attend)
        )
        self.heads: MedusaHeads = self.adapter.heads.clone(dot_general=mixed_dot_general)
        self.joint = self.options.lora_rank > 0
        self.tied, self.cap = config.tied_embeddings, config.logit_softcap
        self.rates = {"heads": self.options.head_rate, "lora": 1.0} if self.joint else None

    def init(self) -> Tree:
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

    def batch(self, step: int) -> Row:
        o = self.options
        ramp = np.sin(np.pi / 2 * step / o.steps) if o.heads_ramp == "sine" else 1.0
        share = np.full(o.batch_size, o.heads_weight * ramp if self.joint else 1.0, np.float32)
        return {**self.batches[step], "share": share}

    @functools.cached_property
    def batches(self) -> Rows:
        """Returns the rows of each step."""
        o, share = self.options, self.material.share
        if share is None:
            share = float(self.material.written is not None)
        return self.material.batches(o.sequence_length, o.batch_size, o.seed, share)

    def split(self, params: Tree, frozen: Tree) -> tuple[Tree, Tree]:
        """Returns the parameters of the heads, and those of the target with its LoRA merged."""
        if not self.joint:
            return params, frozen
        scale = self.options.lora_alpha / self.options.lora_rank
        merged = merge(frozen, cast(Lora, params["lora"]), scale)
        return cast(Tree, params["heads"]), constrain_like(merged, layout(frozen))

    def hidden(self, target: Tree, batch: Batch) -> Array:
        """Returns the target's last hidden states [B * T, E]."""
        if STATES in batch:
            states = batch[STATES].astype(jnp.float32)
            return states.reshape(-1, states.shape[-1])
        return read(self.reader, target, batch["tokens"][:, :-1], self.end)

    def loss(self, params: Tree, frozen: Tree, batch: Batch) -> tuple[Array, dict[str, Array]]:
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
        self, heads: Tree, hidden: Array, matrix: Array, tokens: Array, mask: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Returns the weighted sum of the heads' losses, and the loss of each."""
        rows, length = mask.shape
        # `chunked` applies the linear map, so that the logits never exist all at once.
        heads_hidden = medusa_hidden(self.heads.clone(own_heads=False), heads, hidden)
        total, metrics = jnp.float32(0), {}
        for k in range(self.heads.num_heads):
            labels, weight = labels_ahead(tokens, mask, k)
            size = jnp.maximum(weight.sum(), 1)
            own = cast(Sequence[Array], heads["head"])[k] if self.heads.own_heads else matrix
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
        self, frozen: Tree, hidden: Array, matrix: Array, tokens: Array, mask: Array
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

    def _ranks(
        self, heads: Tree, target: Tree, texts: np.ndarray, states: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns the ranks [B, T - 1 - K, K] that K heads give to the tokens of texts [B, T].

        The target reads the texts, unless there are its `states` [B, T, E].
        """
        matrix = head_matrix(target)
        if states is None:
            read = lay_batch(texts, self.mesh)
            ranks = measure_ranks(self.reader, target, self.heads, heads, matrix, read)
        else:
            given = jnp.asarray(states, jnp.float32)
            ranks = measure_ranks(self._said, given, self.heads, heads, matrix, texts)
        return ranks.reshape(len(texts), -1, self.heads.num_heads)

    @functools.cached_property
    def _said(self) -> Model[ArrayTree, Cache]:
        """Returns a model that returns the hidden states it is given; its logits are not used."""
        size = self.target.model.vocab_size

        def said(states: Array, tokens: Array) -> tuple[Array, Array]:
            return jnp.zeros((*tokens.shape, size)), states

        return from_function(said, vocab_size=size, max_positions=self.options.sequence_length)

    def held_out(self, index: int, heads: Tree, target: Tree) -> tuple[np.ndarray, np.ndarray]:
        """Returns `drawn` [B, T] and ranks [B, T - 1 - K, K] of a held-out batch."""
        o = self.options
        rows = self.material.test(o.sequence_length, o.batch_size)[index]
        return rows["drawn"], self._ranks(heads, target, rows["tokens"][:, :-1], rows.get(STATES))

    def held_out_ranks(self, heads: Tree, target: Tree) -> np.ndarray:
        """Returns ranks [M, K] at held-out positions where the label of every head is learned."""
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

    def evaluate(self, params: Tree) -> dict[str, float]:
        o = self.options
        heads, target = self.split(params, self.frozen)
        ranks = self.held_out_ranks(heads, target)
        report = {
            f"held_out_top1_head_{k}": float((ranks[:, k] == 0).mean()) for k in range(o.num_heads)
        }
        report["held_out_length"] = expected_length(ranks, best_tree(ranks, o.tree_nodes))
        # Measured on a chain: the best tree changes, and each tree would compile a new program.
        proposer = dataclasses.replace(self.adapter.proposer, choices=())
        key = "head" if "head" in target else "embedding"
        arrays = jax.tree.map(lambda leaf: leaf[None], heads)
        adapters = MedusaParams(arrays, jnp.int32(0), {key: target[key]})
        return report | self.tau(proposer, Params(target, adapters), {"temperature": 0.0})

    @property
    def models(self) -> dict[str, dict[str, Json]]:
        heads = named(self.options.initial, self.heads, self.adapter.params)
        return {**super().models, "heads": heads}

    def goal(self, report: dict[str, float]) -> float:
        """Returns tau where it is measured; else the expected length of the best tree."""
        return report.get("tau", report["held_out_length"])

    def export(self, params: Tree, folder: pathlib.Path) -> None:
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

    def drafted(self, heads: Tree, target: Tree) -> tuple[np.ndarray, str]:
        """Returns ranks [M, K] at the positions of drafts, and the name of the text."""
        if isinstance(self.material, RecordedMaterial):
            return self._recorded(self.material.teacher, heads, target)
        texts, starts = self._write(target)
        ranks = self._ranks(heads, target, texts)
        # Heads draft after a prompt, so only ranks of tokens of the target are counted.
        return ranks[np.arange(ranks.shape[1]) >= starts[:, None]], "greedy text"

    def _recorded(self, teacher: Recorded, heads: Tree, target: Tree) -> tuple[np.ndarray, str]:
        """Returns ranks of recorded answers that the target may have generated, else of text."""
        text, answers, _ = teacher.request.counts
        if not answers:
            return self.held_out_ranks(heads, target), "held-out text"
        rows = teacher.rows(range(text, text + min(answers, self.options.written_sequences)))
        ranks = self._ranks(heads, target, rows["tokens"][:, :-1], rows[STATES])
        return ranks[self.learned_windows(rows["drawn"])], "recorded answers"

    def _write(self, target: Tree) -> tuple[np.ndarray, np.ndarray]:
        """Lets the target continue held-out prompts greedily.

        Returns the tokens [written_sequences, sequence_length] and the lengths of the prompts.  On
        a mesh the number of sequences is rounded up to a multiple of its row parts.
        """
        o, parts = self.options, row_parts(self.mesh)
        length, rows = o.sequence_length, -(-o.written_sequences // parts) * parts
        prompts, lengths = pad(self.prompts(rows, length - o.num_heads - 2), length)
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
    options, target, teacher, mesh = opened(options)
    if teacher is not None:
        end, material = None, RecordedMaterial.of(teacher, share_of_answers(None, teacher))
    else:
        material = gather(options, target, pathlib.Path(options.out), options.sequence_length)
        if material.text is not None and material.written is not None:
            raise ValueError(
                "--data holds both text and sequences with answers: heads learn from one kind only"
            )
        assert target.tokenizer is not None  # `load_target` has checked it
        end = starts_of_documents(target.tokenizer, options.isolate_documents)
    job = TrainMedusa(options, target, material, first_adapter(options, target), end, mesh=mesh)
    job.say_sizes(lora=num_params(jax.eval_shape(job.changes)) if job.joint else 0)
    return job
