"""The model that a job trains from scratch: its sizes as options, its pass over packed text, its folder at the end."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import tokenizers
from jax import Array
from jax.sharding import Mesh

from specjax.files import find_folder, load, read_config, read_json, read_tokenizer, save
from specjax.models import LanguageModel, LinenModel, Transformer, TransformerConfig
from specjax.parallel import TRAINING_RULES, shardings
from specjax.text import vocabulary_digest
from specjax.training.options import Options, at_least, matching, option
from specjax.training.precision import mixed_dot_general


@dataclasses.dataclass(frozen=True)
class ModelOptions(Options):
    """Sizes of a Llama-type model."""

    hidden_size: int = option(256, "features per token")
    mlp_size: int = option(688, "features inside the MLP")
    num_layers: int = option(6, "layers")
    num_heads: int = option(4, "query heads")
    num_kv_heads: int = option(2, "key and value heads")
    initial: str | None = option(
        None, "folder of a model of these sizes to go on from, of any family; none: random numbers"
    )
    isolate_documents: bool = option(
        False, "documents packed into a sequence do not see each other"
    )
    remat: bool = option(False, "compute layers again in the backward pass, to need less memory")

    def __post_init__(self):
        super().__post_init__()
        at_least(self, 1, "hidden_size", "mlp_size", "num_layers", "num_heads", "num_kv_heads")
        if self.initial is not None:  # whose heads may have another size
            return
        if self.num_heads % self.num_kv_heads:
            heads = f"--num-heads {self.num_heads}"
            raise ValueError(f"--num-kv-heads is {self.num_kv_heads}; it must divide {heads}")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"--hidden-size is {self.hidden_size}; twice --num-heads {self.num_heads} must "
                "divide it, since rotary positions turn pairs of a head's features"
            )


SIZES = ("hidden_size", "mlp_size", "num_layers", "num_heads", "num_kv_heads")


def make_model(options: Any, vocab_size: int) -> LinenModel:
    """The model in the folder `--initial`, or a Llama-type one of the sizes in the options, its
    embeddings tied; multiplying in bfloat16.

    Raises:
      ValueError: the folder's model has other sizes, or cannot read `--sequence-length` tokens.
    """
    config = _new(options, vocab_size) if options.initial is None else _initial(options)
    return LinenModel(Transformer(config, mixed_dot_general, remat=options.remat))


def _new(options: Any, vocab_size: int) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=vocab_size,
        hidden_size=options.hidden_size,
        mlp_size=options.mlp_size,
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.hidden_size // options.num_heads,
        max_positions=options.sequence_length,
        tied_embeddings=True,
    )


def _initial(options: Any) -> TransformerConfig:
    """That of the folder `--initial`; its context grows if `--sequence-length` is longer."""
    origin, config = f"--initial {options.initial}", read_config(find_folder(options.initial))[2]
    matching(options, config, origin, *SIZES)
    if options.sequence_length <= config.max_positions:
        return config
    ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
    # A table of positions has no more rows, and a scaling is made for the context that it has.
    if config.position_offset is not None or any(rope and rope.kind != "default" for rope in ropes):
        raise ValueError(
            f"--sequence-length is {options.sequence_length}; {origin} reads at most "
            f"{config.max_positions} tokens, and its positions cannot go on"
        )
    return dataclasses.replace(config, max_positions=options.sequence_length)


def check_initial(
    options: Any, words: tokenizers.Tokenizer | None, size: int, whose: str, cure: str
) -> None:
    """Before the folder `--initial` is read, and anything is compiled: does it speak the tokens of the job?

    Args:
      words: the job's tokenizer.
      size: of the job's vocabulary, padding included.
      whose, cure: what has these tokens, and what to do where the folder has others.

    Raises:
      ValueError: it speaks other tokens, or has another number of them.
    """
    if options.initial is None or words is None:
        return
    folder = find_folder(options.initial)
    path, found = folder / "tokenizer.json", read_json(folder / "config.json").get("vocab_size")
    own = read_tokenizer(path) if path.exists() else words
    if found != size or vocabulary_digest(own) != vocabulary_digest(words):
        raise ValueError(
            f"--initial {options.initial} speaks other tokens ({own.get_vocab_size()}, in a vocabulary of {found}) "
            f"than {whose} ({words.get_vocab_size()}, in one of {size}): {cure}, or leave it out"
        )


def initial_params(model: LinenModel, options: Any, mesh: Mesh | None = None) -> Any:
    """Those of the folder `--initial`, or random ones of the seed; on a mesh, each device makes or reads its part."""
    key = jax.random.key(options.seed)
    if options.initial is None:
        at = None if mesh is None else shardings(model, mesh, TRAINING_RULES)
        return jax.jit(model.init, out_shardings=at)(key)
    found = load(options.initial, mesh=mesh, rules=TRAINING_RULES)
    return {name: found.params[name] for name in jax.eval_shape(model.init, key)}


def read(model: LinenModel, params: Any, inputs: Array, end: int | None = None) -> Array:
    """The features [B * T, E] of a batch [B, T] of packed text.

    With `end`, the token that starts a document, each document is read as if it stood alone.
    """
    positions, mask = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape), None
    if end is not None:
        positions, mask = isolate(inputs == end)
    hidden = model.apply(params, inputs, positions, None, mask).hidden
    return hidden.reshape(-1, hidden.shape[-1])


def isolate(starts: Array) -> tuple[Array, Array]:
    """Positions [B, T] that begin again, and a mask [B, T, T] that sees nothing before, where `starts` [B, T] says."""
    place = jnp.arange(starts.shape[1])
    first = jax.lax.cummax(jnp.where(starts, place, 0), axis=1)
    return place - first, (place[:, None] >= place) & (first[:, :, None] == first[:, None])


def save_student(
    folder: pathlib.Path,
    model: LinenModel,
    params: Any,
    words: tokenizers.Tokenizer,
    eos: tuple[int, ...],
) -> None:
    """Write a Hugging Face folder in bfloat16.

    Args:
      words: what turns text into the model's tokens.
      eos: the ids that end a text for it; () where none does.
    """
    save(LanguageModel(model, params, words, eos, folder.name), folder, dtype=jnp.bfloat16)
