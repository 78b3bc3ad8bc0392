"""python -m train.distill: a small draft learns to say what the target would say.

Forward KL from the target to the draft, on windows of text and on text that the target wrote itself.  What the target
writes is where a draft is used; the text keeps it from knowing only the target's favourite phrases.
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
from tqdm import tqdm

from specjax.checkpoint import LanguageModel, load
from specjax.decoding import Decoder
from specjax.models.base import LinenModel
from specjax.models.transformer import Transformer, head_matrix
from specjax.proposers import NoProposer
from specjax.rules import Match
from specjax.sampling import Sampling
from specjax.types import Params
from train.corpus import Source, Tokens, prepare
from train.loop import LoopOptions, fit
from train.losses import agreement, chunked, forward_kl
from train.options import REQUIRED, option, parse
from train.precision import mixed_dot_general
from train.student import ModelOptions, initial_params, make_model, read, save_student


@dataclasses.dataclass(frozen=True)
class DistillOptions(LoopOptions, ModelOptions):
    """The target, the data, the draft's sizes, and the loop."""

    target: str = option(REQUIRED, "folder of the target")
    data: tuple[str, ...] = option(REQUIRED, "folders (or files) of text")
    pattern: str = option("*.py", "which files below a folder")
    exclude: tuple[str, ...] = option((), "names of folders to leave out")
    max_bytes: int = option(200_000, "larger files are left out")
    sampled_fraction: float = option(0.5, "part of each batch that the target wrote (lambda)")
    sampled_sequences: int = option(1024, "how many sequences the target writes")
    sampled_prompt: int = option(32, "tokens of text that the target continues")
    sampled_batch: int = option(16, "sequences that it writes at once")
    eval_batches: int = option(32, "held-out batches per evaluation")
    hidden_size: int = option(128, "features per token")
    mlp_size: int = option(352, "features inside the MLP")
    num_layers: int = option(1, "layers")
    num_heads: int = option(2, "query heads")
    num_kv_heads: int = option(1, "key and value heads")

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.sampled_fraction <= 1:
            raise ValueError(f"--sampled-fraction is {self.sampled_fraction}; it must lie in [0, 1]")
        if not 0 < self.sampled_prompt < self.sequence_length:
            raise ValueError(
                f"--sampled-prompt is {self.sampled_prompt}; it must be shorter than a sequence, and not 0"
            )


def sample(target: LanguageModel, text: Tokens, options: DistillOptions, folder: pathlib.Path) -> np.ndarray:
    """Sequences [sampled_sequences, T + 1] that begin with text and go on as the target does at temperature 1.

    A file a batch, each a function of its number: an interrupted call goes on where it stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows, length = options.sampled_batch, options.sequence_length + 1
    # An end of text does not end a sequence: the target goes on with the next document, as in the packed text.
    decoder = Decoder(target.model, NoProposer(), Match(), (), length)
    parts = []
    numbers = range(-(-options.sampled_sequences // rows))
    for number in tqdm(numbers, desc="the target writes", unit="batch", disable=None):
        path = folder / f"{number:05d}.npy"
        if not path.exists():
            prompt = text.batch(number, rows, options.sampled_prompt - 1, options.seed + 1)
            keys = jax.random.split(jax.random.fold_in(jax.random.key(options.seed), number), rows)
            params = Params(target.params)
            state = decoder.prefill(
                params, prompt, np.full(rows, options.sampled_prompt, np.int32), limit=np.full(rows, length, np.int32),
                sampling=Sampling.create(rows, 1.0), key=keys,
            )  # fmt: skip
            tokens = np.asarray(decoder.run(params, state).tokens[:, :length], np.uint16)
            partial = path.with_suffix(".partial")
            with open(partial, "wb") as file:
                np.save(file, tokens)
            partial.rename(path)
        parts.append(np.load(path))
    return np.concatenate(parts)[: options.sampled_sequences].astype(np.int32)


@dataclasses.dataclass(eq=False)
class Distill:
    """Forward KL to a frozen target."""

    options: DistillOptions
    draft: LinenModel
    target: LinenModel
    frozen: Any  # the target's parameters
    train: Tokens
    held_out: Tokens
    sampled: np.ndarray | None

    def init(self) -> Any:
        return initial_params(self.draft, self.options)

    def batch(self, step: int) -> np.ndarray:
        o = self.options
        written = 0 if self.sampled is None else round(o.batch_size * o.sampled_fraction)
        parts = []
        if written < o.batch_size:
            parts.append(self.train.batch(step, o.batch_size - written, o.sequence_length, o.seed))
        if self.sampled is not None and written:
            epoch, first = divmod(step * written, len(self.sampled) - len(self.sampled) % written)
            order = np.random.default_rng((o.seed, epoch)).permutation(len(self.sampled))
            parts.append(self.sampled[order[first : first + written]])
        return np.concatenate(parts)

    def _compare(self, loss: Any, params: Any, frozen: Any, batch: Array) -> Any:
        """`loss` of the draft's logits against the target's, at every token of a batch."""
        inputs = batch[:, :-1]
        hidden = read(self.draft, params, inputs)
        target_hidden = jax.lax.stop_gradient(read(self.target, frozen, inputs))
        rows = (jnp.ones(len(hidden)), target_hidden)
        shared = (head_matrix(frozen),)
        return loss(hidden, head_matrix(params), rows, shared)

    def loss(self, params: Any, frozen: Any, batch: Array) -> tuple[Array, dict[str, Array]]:
        return self._compare(chunked(forward_kl), params, frozen, batch) / (batch.shape[0] * (batch.shape[1] - 1)), {}

    @functools.cached_property
    def _measure(self):
        def all_at_once(hidden, head, rows, shared):
            logits = mixed_dot_general(hidden, head, (((1,), (0,)), ((), ())))
            return jnp.array([forward_kl(logits, *rows, *shared), *agreement(logits, *rows, *shared)]) / len(hidden)

        return jax.jit(functools.partial(self._compare, all_at_once))

    def evaluate(self, params: Any) -> dict[str, float]:
        o = self.options
        batches = (self.held_out.batch(i, 4, o.sequence_length, 0) for i in range(o.eval_batches))
        kl, alpha, same = np.mean([self._measure(params, self.frozen, batch) for batch in batches], axis=0)
        return {"held_out_kl": float(kl), "held_out_alpha": float(alpha), "held_out_same_argmax": float(same)}

    def export(self, params: Any, folder: pathlib.Path) -> None:
        save_student(folder, self.draft, params, self.train.path.parent / "tokenizer.json")


def main(argv: list[str] | None = None) -> None:
    options = parse(DistillOptions, argv, __doc__)
    out = pathlib.Path(options.out)
    target = load(options.target)
    if target.tokenizer is None:
        raise ValueError(f"--target {options.target} has no tokenizer.json, which tokenises --data")
    if options.sequence_length > target.model.max_positions:
        raise ValueError(
            f"--sequence-length is {options.sequence_length}; the target reads at most {target.model.max_positions}"
        )
    source = Source(options.data, options.pattern, options.exclude, options.max_bytes)
    tokenizer = str(pathlib.Path(options.target) / "tokenizer.json")
    _, train, held_out = prepare(source, out / "corpus", target.model.vocab_size, tokenizer)
    sampled = sample(target, train, options, out / "sampled") if options.sampled_fraction else None
    frozen_model = LinenModel(Transformer(target.model.module.config, mixed_dot_general))
    draft = make_model(options, target.model.vocab_size)
    sizes = {
        "target": target.num_params,
        "draft": sum(x.size for x in jax.tree.leaves(jax.eval_shape(draft.init, jax.random.key(0)))),
    }
    print(f"parameters: {json.dumps(sizes)}", flush=True)
    fit(Distill(options, draft, frozen_model, target.params, train, held_out, sampled), options)


if __name__ == "__main__":
    main()
