"""What a target wrote, as a folder: `dataset.json`, shards of token ids, and lines of text.

    dataset.json          by which target, with which tokenizer and settings; how much; is it complete?
    00000.safetensors     tokens [R, L] int32; prompt_length, length [R] int32; and if asked, with the settings' warp,
                          top_ids [R, L, k] int32 and top_log_probs [R, L, k] float32 of each new token's place
    text.jsonl            {"prompt", "text"} of each row

A shard is a function of its number: an interrupted call goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import tokenizers
from tqdm import tqdm

from specjax.call import pad_rows
from specjax.decoding import Decoder
from specjax.files import TOKENIZER, find_folder
from specjax.parallel import leader, mesh_of, row_parts, to_host
from specjax.sampling import Sampling, make_key
from specjax.training.conversations import Row
from specjax.training.corpus import digest
from specjax.training.measure import pad, width_for
from specjax.training.mesh import together
from specjax.training.record import write as write_text
from specjax.types import DecodeState, Params

MANIFEST = "dataset.json"


def model_hashes(model: str | pathlib.Path) -> dict[str, str]:
    """Of a model: its configuration and weights; its tokenizer and the template of its conversations."""
    folder = find_folder(model)
    weights, words = sorted(folder.glob("*.safetensors")), [folder / name for name in TOKENIZER]
    return {
        "target": digest(folder / "config.json", *weights),
        "tokenizer": digest(*(path for path in words if path.exists())),
    }


@dataclasses.dataclass(frozen=True)
class Request:
    """How a target is to write.

    Attributes:
      hashes: of the target, from `model_hashes`.
      sequences: how many.
      batch: sequences at once, and in a shard.
      new_tokens: at most, a sequence.
      settings: `temperature`, `top_k` and so on, as `Sampling.create` takes them.
      seed: a sequence's noise depends on it and on the sequence's number.
      top: record the log-probabilities of so many likeliest tokens.
      prompts: hash of them, or of where they come from.
      dtype: of the target.
    """

    hashes: dict[str, str]
    sequences: int
    batch: int
    new_tokens: int
    settings: dict[str, Any]
    seed: int
    top: int
    prompts: str
    dtype: str = "float32"


def write(
    folder: pathlib.Path, request: Request, decoder: Decoder, params: Params,
    prompts: Callable[[int], Sequence[Sequence[int]]], tokenizer: tokenizers.Tokenizer | None,
) -> None:  # fmt: skip
    """Let a target write, or go on doing so.  `prompts(number)` are those of a shard.

    Raises:
      ValueError: the folder holds a dataset that another request made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, wanted = folder / MANIFEST, dataclasses.asdict(request)
    if path.exists() and (found := json.loads(path.read_text())["request"]) != wanted:
        changes = [
            f"{name} was {found.get(name)} and is {wanted[name]}"
            for name in wanted
            if found.get(name) != wanted[name]
        ]
        raise ValueError(
            f"{folder} holds what another request made:\n  "
            + "\n  ".join(changes)
            + "\nchoose another folder, or delete it"
        )
    if leader():
        _describe(path, wanted, False, 0, 0)
    count = 0
    shards = range(-(-request.sequences // request.batch))
    bar = tqdm(shards, desc="the target writes", unit="shard", disable=None if leader() else True)
    for number in bar:
        shard = folder / f"{number:05d}.safetensors"
        if not shard.exists():
            found = _write_shard(request, decoder, params, prompts(number), number)
            if leader():
                partial = shard.with_suffix(".partial")
                safetensors.numpy.save_file(found, partial)
                partial.rename(shard)
        else:
            found = safetensors.numpy.load_file(shard)
        count += int((found["length"] - found["prompt_length"]).sum())
        bar.set_postfix(new_tokens=count)
    if leader():
        if tokenizer is not None:
            _write_lines(folder, tokenizer)
        _describe(path, wanted, True, request.sequences, count)
    together(f"wrote {folder}")


def _describe(
    path: pathlib.Path, request: dict[str, Any], complete: bool, sequences: int, new_tokens: int
) -> None:
    facts = {"complete": complete, "sequences": sequences, "new_tokens": new_tokens}
    write_text(path, json.dumps({"request": request, **facts}, indent=2) + "\n")


def _write_shard(
    request: Request,
    decoder: Decoder,
    params: Params,
    prompts: Sequence[Sequence[int]],
    number: int,
) -> dict[str, np.ndarray]:
    rows = len(prompts)
    # The last shard is filled up with its first prompt, so that it needs no program of its own.
    prompts = [*prompts, *[prompts[0]] * (request.batch - rows)]
    keys = jax.random.split(jax.random.fold_in(make_key(request.seed), number), request.batch)
    prompt, lengths = pad(prompts, min(width_for(prompts), decoder.capacity))
    limit = np.minimum(lengths + np.int32(request.new_tokens), decoder.capacity)
    sampling = Sampling.create(request.batch, **request.settings)
    given = (prompt, lengths), {"limit": limit, "sampling": sampling, "key": keys}
    places, names = pad_rows(given, -request.batch % row_parts(mesh_of(params.target)))
    state, *top = _run(decoder, request.top, params, decoder.prefill(params, *places, **names))
    tokens, ends, *top = (x[: request.batch] for x in to_host((state.tokens, state.length, *top)))
    width = ends[:rows].max()
    place = np.arange(width)
    new = (place >= lengths[:, None]) & (place < ends[:, None])
    found = {
        "tokens": np.where(place < ends[:, None], tokens[:, :width], 0),
        "prompt_length": lengths,
        "length": ends,
    }
    if request.top:
        names = ("top_ids", "top_log_probs")
        found |= {
            n: np.where(new[:, :, None], x[:, :width], 0) for n, x in zip(names, top, strict=True)
        }
    return {name: np.ascontiguousarray(x[:rows]) for name, x in found.items()}


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _run(decoder: Decoder, top: int, params: Params, state: DecodeState) -> Any:
    """`decoder.run`, and the likeliest tokens at each place: the last state, ids and log-probabilities [B, L, top]."""

    def step(carry):
        before, *buffers = carry
        after, info = decoder.step(params, before)
        # The i-th token of a step was drawn after the i-th node of the accepted path.
        log_probs, ids = jax.lax.top_k(jax.nn.log_softmax(info.logits), top)
        put = jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0))
        news = (jnp.take_along_axis(x, info.path[..., None], axis=1) for x in (ids, log_probs))
        return after, *(put(b, new, before.length) for b, new in zip(buffers, news, strict=True))

    shape = (*state.tokens.shape, top)
    start = (state, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
    return jax.lax.while_loop(lambda carry: ~carry[0].done.all(), step, start)


def _write_lines(folder: pathlib.Path, tokenizer: tokenizers.Tokenizer) -> None:
    lines = []
    for tokens, start in read(folder):
        prompt, whole = tokenizer.decode(tokens[:start].tolist()), tokenizer.decode(tokens.tolist())
        text = (
            whole[len(prompt) :]
            if whole.startswith(prompt)
            else tokenizer.decode(tokens[start:].tolist())
        )
        lines.append(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False) + "\n")
    write_text(folder / "text.jsonl", "".join(lines))


def read(folder: pathlib.Path) -> list[tuple[np.ndarray, int]]:
    """The token ids of each sequence, and how many of them are its prompt."""
    found = []
    for shard in sorted(folder.glob("*.safetensors")):
        arrays = safetensors.numpy.load_file(shard)
        columns = (arrays[name] for name in ("tokens", "prompt_length", "length"))
        found += [(tokens[:end], int(start)) for tokens, start, end in zip(*columns, strict=True)]
    return found


def cuts(folder: pathlib.Path) -> list[int]:
    """The tokens, prompt included, at which each sequence of `read` was to be cut: the target ended
    those that have fewer."""
    new_tokens = json.loads((folder / MANIFEST).read_text())["request"]["new_tokens"]
    return [start + new_tokens for _, start in read(folder)]


def read_masked(
    folder: pathlib.Path, hashes: dict[str, str], settings: dict[str, Any] | None = None
) -> list[Row]:  # fmt: skip
    """The token ids [L] of each sequence, and of each token whether the target drew it, [L] bool.

    Raises:
      ValueError: the dataset is not complete, another target or tokenizer made it, or it was drawn with other
        `settings` (None: with any).
    """
    found = json.loads((folder / MANIFEST).read_text())
    if not found["complete"]:
        raise ValueError(f"{folder} is not complete: run the train.generate that made it again")
    for name, wanted in hashes.items():
        if found["request"]["hashes"][name] != wanted:
            raise ValueError(
                f"{folder} was made with another {name} (sha256 {found['request']['hashes'][name]:.12}) than "
                f"this one ({wanted:.12}): make it again with python -m train.generate"
            )
    drawn_with = {"min_p": 0.0, **found["request"]["settings"]}
    for name, wanted in ({} if settings is None else {"min_p": 0.0, **settings}).items():
        if drawn_with[name] != wanted:
            raise ValueError(
                f"{folder} was drawn with {name} {drawn_with[name]:g}, not {wanted:g}, and this loss is a mean "
                "over text that was drawn as it is served: pass the same settings, or make it again"
            )
    return [(ids, np.arange(len(ids)) >= start) for ids, start in read(folder)]


@dataclasses.dataclass(frozen=True, eq=False)
class Written:
    """Sequences that a target wrote, or somebody else, as batches that depend on the step alone."""

    tokens: np.ndarray  # [R, T + 1] int32, right-padded
    drawn: (
        np.ndarray
    )  # [R, T] float32; 1 where the next token is to be learned: the target's own, an answer
    limit: np.ndarray  # [R] int32; places before the cut: the target ended sequences with fewer

    @classmethod
    def of(cls, rows: Sequence[Row], length: int, cut: Sequence[int] | None = None) -> Written:
        """From token ids [L] and masks [L] bool, each sequence cut or padded to `length` + 1 tokens.

        A sequence of which nothing is left to learn is passed over; how many these are stands on stdout.

        Args:
          rows: token ids, and of each token whether it is learned.
          length: T.
          cut: tokens at which each row was to be cut when it was written (`cuts`); None: at none.

        Raises:
          ValueError: nothing is left of any.
        """
        tokens, drawn = (
            np.zeros((len(rows), length + 1), np.int32),
            np.zeros((len(rows), length), np.float32),
        )
        for row, (ids, mask) in enumerate(rows):
            kept = ids[: length + 1]
            tokens[row, : len(kept)] = kept
            drawn[row, : len(kept) - 1] = mask[1 : length + 1]
        full = np.asarray(drawn.any(1))
        if not full.any():
            raise ValueError(
                f"every prompt fills --sequence-length {length}: nothing of an answer is left to learn"
            )
        if not full.all():
            print(
                f"passed over {(~full).sum()} of {len(rows)} sequences: their prompts fill {length} tokens"
            )
        limit = np.full(len(rows), length) if cut is None else np.minimum(np.array(cut) - 1, length)
        return cls(tokens, drawn, limit.astype(np.int32)).at(full)

    def at(self, rows: np.ndarray) -> Written:
        """Some of the rows, by a mask or by their numbers."""
        return Written(self.tokens[rows], self.drawn[rows], self.limit[rows])

    def split(self, out_of: int = 100) -> tuple[Written, Written]:
        """Training rows, and one in `out_of` that is held out; at least one."""
        held = np.arange(len(self.tokens)) % out_of == 0
        return self.at(~held), self.at(held)

    def rows(self, first: int, count: int, seed: int) -> Written:
        """Rows `first` ... `first + count - 1` of an endless order, shuffled anew each epoch."""
        if not len(self.tokens):
            raise ValueError(
                "no sequences of the target's are left for training: it must write more than one"
            )
        picked = []
        for number in range(first, first + count):
            epoch, index = divmod(number, len(self.tokens))
            picked.append(_order(seed, epoch, len(self.tokens))[index])
        return self.at(np.array(picked, int))


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)
