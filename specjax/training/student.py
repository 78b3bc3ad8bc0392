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

from specjax.files import find_folder, load, read_json, read_tokenizer, save
from specjax.models import LanguageModel, LinenModel, Transformer, TransformerConfig
from specjax.parallel import TRAINING_RULES, shardings
from specjax.text import vocabulary_digest
from specjax.training.options import option
from specjax.training.precision import mixed_dot_general


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Sizes of a Llama-type model."""

    hidden_size: int = option(256, "features per token")
    mlp_size: int = option(688, "features inside the MLP")
    num_layers: int = option(6, "layers")
    num_heads: int = option(4, "query heads")
    num_kv_heads: int = option(2, "key and value heads")
    initial: str | None = option(None, "folder of a model of these sizes to go on from; without it, random numbers")
    isolate_documents: bool = option(False, "documents packed into a sequence do not see each other")
    remat: bool = option(False, "compute layers again in the backward pass, to need less memory")


def make_model(options: Any, vocab_size: int) -> LinenModel:
    """A Llama-type model of the sizes in the options, its embeddings tied, multiplying in bfloat16."""
    config = TransformerConfig(
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
    return LinenModel(Transformer(config, mixed_dot_general, remat=options.remat))


def check_initial(options: Any, words: tokenizers.Tokenizer | None, size: int, whose: str, cure: str) -> None:
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
    if found.model.module.config != model.module.config:
        raise ValueError(
            f"--initial {options.initial} is {found.model.module.config}, "
            f"and the options ask for {model.module.config}: give the options its sizes"
        )
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
