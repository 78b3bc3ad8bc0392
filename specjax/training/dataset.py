"""Reads and writes a dataset of sequences of a target: a folder of these files.

    dataset.json          the request (target, tokenizer, settings), counts, and whether it is
                          complete
    00000.safetensors     a shard: tokens [R, L] int32; prompt_length, length [R] int32; on request
                          also top_ids [R, L, k] int32 and top_log_probs [R, L, k] float32 of each
                          new token, after temperature, top-k, top-p and min-p; and the SHA-256 of
                          all that in the file's metadata
    text.jsonl            {"prompt", "text"} of each row

The content of a shard depends only on its number, so an interrupted call continues where it
stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax import Array
from tqdm import tqdm

from specjax import decoding
from specjax._internal.checks import reworded, settle
from specjax.files import TOKENIZER, find_folder
from specjax.parallel import leader, mesh_of, row_parts, to_host
from specjax.sampling import Sampling, make_key
from specjax.training import shards
from specjax.training.conversations import Row
from specjax.training.mesh import together
from specjax.training.record import write as write_text
from specjax.training.shards import check_request, digest, read_if_whole, read_shard, save_shard
from specjax.types import DecodeState, Params

Carry = tuple[DecodeState, Array, Array]
MANIFEST = "dataset.json"
_WEIGHTS = (".safetensors", ".pt")


def model_hashes(model: str | pathlib.Path, lora: str | None = None) -> dict[str, str]:
    """Returns two hashes of a model's folder, and one of its LoRA if there is one.

    "target" covers the configuration and the weights, "tokenizer" the tokenizer and chat template,
    and "lora" all of these files of the LoRA.
    """
    folder = find_folder(model)
    weights = sorted(folder.glob("*.safetensors"))
    texts = [folder / name for name in TOKENIZER]
    hashes = {
        "target": digest(folder / "config.json", *weights),
        "tokenizer": digest(*(path for path in texts if path.exists())),
    }
    if lora is not None:
        folder = find_folder(lora)
        names = ("adapter_config.json", "adapter_model.safetensors", *TOKENIZER)
        hashes["lora"] = digest(*(folder / name for name in names if (folder / name).exists()))
    return hashes


def other_hashes(
    made: Mapping[str, str], wanted: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yields the name and the beginnings of both hashes of each part that is of another model.

    What was made without a LoRA is another model's where one is wanted, and the reverse.
    """
    for name in sorted({*wanted, *({"lora"} & made.keys())}):
        before, now = made.get(name, "none"), wanted.get(name, "none")
        if before != now:
            yield name, f"{before:.12}", f"{now:.12}"


def initial_hash(initial: str | None) -> dict[str, str]:
    """Returns the hash "initial" of the folder `--initial`, a model or heads; {} without one."""
    if initial is None:
        return {}
    folder = find_folder(initial)
    files = (path for path in sorted(folder.iterdir()) if path.suffix in _WEIGHTS)
    return {"initial": digest(folder / "config.json", *files)}


@dataclasses.dataclass(frozen=True)
class Request:
    """The request of a dataset, which a target fulfils.

    Attributes:
      hashes: `model_hashes` of the target.
      sequences: the number of sequences.
      batch: sequences that are decoded at once, which form one shard.
      new_tokens: the most new tokens of a sequence.
      settings: `temperature`, `top_k` and so on, as `Sampling.create` takes them.
      seed: seed of the sampling; a sequence's noise depends on it and on the sequence's number.
      top: the number of likeliest tokens whose log-probabilities are recorded.
      prompts: a hash of the prompts, or a description of where they come from.
      dtype: type of the target's weights.
    """

    hashes: dict[str, str]
    sequences: int
    batch: int
    new_tokens: int
    settings: dict[str, float]
    seed: int
    top: int
    prompts: str
    dtype: str = "float32"


def write(
    folder: pathlib.Path, request: Request, decoder: decoding.Decoder, params: Params,
    prompts: Callable[[int], Sequence[Sequence[int]]], tokenizer: tokenizers.Tokenizer | None,
) -> None:  # fmt: skip
    """Lets a target generate a dataset, or continue an unfinished one.

    `prompts(number)` returns the prompts of shard `number`.

    Raises:
      ValueError: the folder has a dataset of another request.
    """
    begin(folder, request)
    path, wanted = folder / MANIFEST, dataclasses.asdict(request)
    count = 0
    numbers = range(-(-request.sequences // request.batch))
    bar = tqdm(numbers, desc="the target writes", unit="shard", disable=None if leader() else True)
    for number in bar:
        shard = shard_path(folder, number)
        arrays = write_shard(shard, request, decoder, params, prompts(number), number)
        count += int((arrays["length"] - arrays["prompt_length"]).sum())
        bar.set_postfix(new_tokens=count)
    if leader():
        if tokenizer is not None:
            _write_lines(folder, tokenizer)
        _describe(path, wanted, True, request.sequences, count)
    together(f"wrote {folder}")


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the `dataset.json` of a dataset.

    Raises:
      ValueError: it cannot be read.
    """
    fields = {"request", "complete", "sequences", "new_tokens"}
    return shards.read_manifest(folder / MANIFEST, "dataset", fields, "write the dataset")


def shard_path(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / f"{number:05d}.safetensors"


def missing(folder: pathlib.Path, request: Request) -> list[int]:
    """Returns the numbers of the shards that are not there, or are not whole."""
    numbers = range(-(-request.sequences // request.batch))
    return [number for number in numbers if read_if_whole(shard_path(folder, number)) is None]


def write_shard(
    path: pathlib.Path, request: Request, decoder: decoding.Decoder, params: Params,
    prompts: Sequence[Sequence[int]], number: int,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Returns a shard, which is written if the file is not there or is not whole.

    What it holds follows from the request, its prompts and its number, so several processes may
    write one dataset, and the same shard twice.
    """
    if (arrays := read_if_whole(path)) is None:
        arrays = _made_shard(request, decoder, params, prompts, number)
        if leader():
            save_shard(path, arrays)
    return arrays


def begin(folder: pathlib.Path, request: Request) -> None:
    """Makes the folder of a dataset, or checks that one is of this request.

    Raises:
      ValueError: the folder has a dataset of another request.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, wanted = folder / MANIFEST, dataclasses.asdict(request)
    if path.exists():
        check_request(folder, "dataset", read_manifest(folder)["request"], wanted)
    if leader():
        _describe(path, wanted, False, 0, 0)


def _describe(
    path: pathlib.Path,
    request: Mapping[str, object],
    complete: bool,
    sequences: int,
    new_tokens: int,
) -> None:
    facts = {"complete": complete, "sequences": sequences, "new_tokens": new_tokens}
    write_text(path, json.dumps({"request": request, **facts}, indent=2) + "\n")


def _made_shard(
    request: Request,
    decoder: decoding.Decoder,
    params: Params,
    prompts: Sequence[Sequence[int]],
    number: int,
) -> dict[str, np.ndarray]:
    from specjax import generation, measure

    rows = len(prompts)
    # The last shard is filled up with its first prompt, so that no other shape is compiled.
    prompts = [*prompts, *[prompts[0]] * (request.batch - rows)]
    keys = jax.random.split(jax.random.fold_in(make_key(request.seed), number), request.batch)
    prompt, lengths = measure.pad(prompts, min(measure.width_for(prompts), decoder.capacity))
    limit = np.minimum(lengths + np.int32(request.new_tokens), decoder.capacity)
    sampling = Sampling.create(request.batch, **request.settings)
    arguments = (prompt, lengths), {"limit": limit, "sampling": sampling, "key": keys}
    positional, named = generation.pad_rows(
        arguments, -request.batch % row_parts(mesh_of(params.target))
    )
    state, *top = _run(decoder, request.top, params, decoder.prefill(params, *positional, **named))
    tokens, ends, *top = (x[: request.batch] for x in to_host((state.tokens, state.length, *top)))
    width = ends[:rows].max()
    slot = np.arange(width)
    new = (slot >= lengths[:, None]) & (slot < ends[:, None])
    arrays = {
        "tokens": np.where(slot < ends[:, None], tokens[:, :width], 0),
        "prompt_length": lengths,
        "length": ends,
    }
    if request.top:
        names = ("top_ids", "top_log_probs")
        arrays |= {
            n: np.where(new[:, :, None], x[:, :width], 0) for n, x in zip(names, top, strict=True)
        }
    return {name: np.ascontiguousarray(x[:rows]) for name, x in arrays.items()}


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _run(decoder: decoding.Decoder, top: int, params: Params, state: DecodeState) -> Carry:
    """Runs `decoder.run`, and also records the likeliest tokens at each position.

    Returns:
      The last state, and the ids and log-probabilities [B, L, top] of these tokens.
    """

    def step(carry: Carry) -> Carry:
        before, *buffers = carry
        after, info = decoder.step(params, before)
        # The i-th token of a step was drawn after the i-th node of the accepted path.
        log_probs, ids = jax.lax.top_k(jax.nn.log_softmax(info.logits), top)
        put = jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0))
        all_ids, all_log_probs = (
            put(buffer, jnp.take_along_axis(x, info.path[..., None], axis=1), before.length)
            for buffer, x in zip(buffers, (ids, log_probs), strict=True)
        )
        return after, all_ids, all_log_probs

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
    """Returns the token ids [L] of each sequence, and the length of its prompt."""
    sequences, again = [], "run the command that made the dataset again"
    for shard in sorted(folder.glob("*.safetensors")):
        with reworded("", f": delete it, and {again}, which writes this file as it was"):
            arrays = read_shard(shard)
        columns = (arrays[name] for name in ("tokens", "prompt_length", "length"))
        sequences += [(ids[:end], int(start)) for ids, start, end in zip(*columns, strict=True)]
    return sequences


def cuts(folder: pathlib.Path) -> list[int]:
    """Returns the largest length, prompt included, that each sequence of `read` could have reached.

    If a sequence is shorter, the target ended it with an EOS.
    """
    new_tokens = read_manifest(folder)["request"]["new_tokens"]
    return [start + new_tokens for _, start in read(folder)]


def read_masked(
    folder: pathlib.Path,
    hashes: Mapping[str, str],
    settings: Mapping[str, float] | None = None,
    exact: bool = False,
) -> list[Row]:
    """Returns the token ids [L] of each sequence, and a mask [L] bool of the target's tokens.

    If it was drawn with other settings than `settings`, the difference is printed, or refused if
    they must be `exact`.

    Raises:
      ValueError: the dataset is not complete, another target or tokenizer made it, or it was drawn
        with other settings.
    """
    manifest = read_manifest(folder)
    settle(
        (
            not manifest["complete"],
            f"{folder} is not complete: run the train.generate that made it again",
        ),
        *(
            (
                True,
                f"{folder} was made with another {name} (sha256 {before}) than this one ({now}): "
                "make it again with specjax train generate",
            )
            for name, before, now in other_hashes(manifest["request"]["hashes"], hashes)
        ),
    )
    drawn_with = {"min_p": 0.0, **manifest["request"]["settings"]}
    for name, wanted in ({} if settings is None else {"min_p": 0.0, **settings}).items():
        if drawn_with[name] == wanted:
            continue
        difference = f"{folder} was drawn with {name} {drawn_with[name]:g}, not {wanted:g}"
        if exact:
            raise ValueError(
                f"{difference}, and this "
                "loss is a mean over text that was drawn with the settings it is served with: "
                "pass the same settings, or make it again"
            )
        print(f"note: {difference}, for which this run learns", flush=True)
    return [(ids, np.arange(len(ids)) >= start) for ids, start in read(folder)]
