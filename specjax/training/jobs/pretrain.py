"""specjax train pretrain: train a tokenizer and a causal language model on text files."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax import Array
from jax.sharding import Mesh

from specjax.files import find_folder, read_config, read_outline
from specjax.models import LinenModel, head_matrix
from specjax.options.command import parse
from specjax.options.fields import count, inside, option
from specjax.training import student
from specjax.training.corpus import Tokens, end_of_text, starts_of_documents
from specjax.training.dataset import initial_hash
from specjax.training.lock import alone
from specjax.training.loop import fit, mesh_of_run
from specjax.training.losses import chunked, cross_entropy, with_cap
from specjax.training.mesh import lay_batch
from specjax.training.mixture import DataOptions, Mixture
from specjax.training.ordering import Rows
from specjax.training.record import named
from specjax.training.student import ModelOptions, read
from specjax.training.tokenising import prepare_all
from specjax.training.trees import Batch, Row, Tree
from specjax.types import Json


@dataclasses.dataclass(frozen=True)
class PretrainOptions(ModelOptions, DataOptions):
    """The data, the model's sizes, and the loop."""

    group = "pretraining"
    common = (
        "data", "weights", "hidden_size", "mlp_size", "num_layers", "num_heads",
        "num_kv_heads", "initial", "like", "mesh", "steps", "batch_size",
        "learning_rate", "optimizer", "out", "sequence_length", "seed", "eval_every",
        "save_every", "curves", "tokenizer", "vocab_size",
    )  # fmt: skip

    tokenizer: str | None = option(
        None,
        "an existing tokenizer.json; by default that of a model whose weights are taken, else a "
        "new one is trained",
    )
    max_positions: int | None = option(
        None, "tokens that a new model reads at most; default: --sequence-length, or as --like"
    )
    vocab_size: int = option(4096, "vocabulary size of a new tokenizer")
    eval_batches: int = count(32, "held-out batches per evaluation")

    def __post_init__(self):
        super().__post_init__()
        inside(self, f"[{self.sequence_length}, inf)", "max_positions")
        if self.tokenizer is None:  # a byte-level BPE has 256 bytes and the end-of-text token
            inside(self, "[257, inf)", "vocab_size")


@dataclasses.dataclass(eq=False)
class Pretrain:
    """Trains a language model by cross-entropy on windows of text."""

    options: PretrainOptions
    model: LinenModel
    train: Tokens | Mixture
    held_out: Tokens | Mixture
    tokenizer: tokenizers.Tokenizer
    end: int | None = None  # the token that starts a document, if documents are isolated
    mesh: Mesh | None = None

    @property
    def frozen(self) -> Tree:
        return {}

    @property
    def inputs(self) -> dict[str, str]:
        start = self.options.start
        weights = start.folder if start is not None and start.has_weights else None
        return {**self.train.inputs, **initial_hash(weights)}

    def init(self) -> Tree:
        return student.initial_params(self.model, self.options, self.mesh)

    @functools.cached_property
    def batches(self) -> Rows:
        return self._rows(self.train, self.options.seed)

    def _rows(self, text: Tokens | Mixture, seed: int) -> Rows:
        o = self.options
        return text.rows(o.sequence_length, seed).batch(o.batch_size)

    def batch(self, step: int) -> Row:
        return {"tokens": self.batches[step]["tokens"]}

    def show(self, batch: Row) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens, all of which are learned, for --show-mask."""
        return batch["tokens"], np.ones_like(batch["tokens"][:, 1:])

    def loss(self, params: Tree, frozen: Tree, batch: Batch) -> tuple[Array, dict[str, Array]]:
        del frozen
        hidden = read(self.model, params, batch["tokens"][:, :-1], self.end)
        labels = batch["tokens"][:, 1:].reshape(-1)
        loss = with_cap(cross_entropy, self.model.module.config.logit_softcap)
        total = chunked(loss)(hidden, head_matrix(params), (jnp.ones(len(labels)), labels))
        return total / len(labels), {}

    @functools.cached_property
    def _measure(self) -> Callable[[Tree, Batch], Array]:
        return jax.jit(lambda params, batch: self.loss(params, {}, batch)[0])

    def evaluate(self, params: Tree) -> dict[str, float]:
        held_out = self._rows(self.held_out, 0)
        losses = [
            self._measure(params, lay_batch({"tokens": held_out[i]["tokens"]}, self.mesh))
            for i in range(self.options.eval_batches)
        ]
        return {"held_out_loss": float(np.mean(losses))}

    @property
    def facts(self) -> dict[str, Json]:
        start = self.options.start
        shapes = jax.eval_shape(self.model.init, jax.random.key(0))
        model = named(start and start.folder, self.model.module.config, shapes)
        return {"models": {"model": model}}

    def goal(self, report: dict[str, float]) -> float:
        return -report["held_out_loss"]

    def export(self, params: Tree, folder: pathlib.Path) -> None:
        start, end = self.options.start, end_of_text(self.tokenizer)
        eos = () if end is None else (end,)
        if start is not None and start.has_weights:
            eos = read_outline(start.folder).eos or eos
        student.save_student(folder, self.model, params, self.tokenizer, eos, start=start)


def _tokenizer(options: PretrainOptions) -> str | None:
    """Returns the file of the tokenizer; None: a new one is trained."""
    if options.tokenizer is not None or options.start is None or not options.start.has_weights:
        return options.tokenizer
    return str(find_folder(options.start.folder) / "tokenizer.json")


def main(argv: list[str] | None = None) -> None:
    options = parse(PretrainOptions, argv, __doc__)
    with alone(options.out, writes=not options.show_mask):
        fit(make_job(options), options)


def make_job(options: PretrainOptions) -> Pretrain:
    """Reads what the options name, for `fit` or for a loop of one's own.

    Raises:
      ValueError: options, model and data do not fit together.
    """
    mesh = mesh_of_run(options)
    out = pathlib.Path(options.out)
    tokenizer, train, held_out = prepare_all(
        options.source, options.weights, out / "corpus", options.vocab_size, _tokenizer(options)
    )
    for text in (train, held_out):  # refused now, and not where it is read first
        text.windows(options.sequence_length)
    start, size = options.start, tokenizer.get_vocab_size()
    if start is not None and start.has_weights:  # its vocabulary may have padding
        size = max(size, read_config(find_folder(start.folder))[2].vocab_size)
    student.check_initial(
        start,
        tokenizer,
        size,
        "the tokenizer of this run",
        "leave out --tokenizer and pass another --out, to go on with its tokens",
    )
    model = student.make_model(options, size, options.max_positions)
    end = starts_of_documents(tokenizer, options.isolate_documents)
    return Pretrain(options, model, train, held_out, tokenizer, end, mesh=mesh)
