"""The model that a job trains: its options, its pass over packed text, and saving it."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Protocol

import jax
import jax.numpy as jnp
import tokenizers
from jax import Array
from jax.sharding import Mesh

from specjax.contract import Arrays
from specjax.files import find_folder, load, read_config, read_json, read_tokenizer, save
from specjax.models import LanguageModel, LinenModel, Transformer, TransformerConfig
from specjax.parallel import TRAINING_RULES, shardings
from specjax.text import vocabulary_digest
from specjax.training.options import Options, at_least, matching, option
from specjax.training.precision import mixed_dot_general


@dataclasses.dataclass(frozen=True)
class ModelOptions(Options):
    """The sizes of a Llama-type model."""

    hidden_size: int = option(256, "size of the hidden states")
    mlp_size: int = option(688, "size of the hidden layer of an MLP")
    num_layers: int = option(6, "layers")
    num_heads: int = option(4, "query heads")
    num_kv_heads: int = option(2, "key and value heads")
    initial: str | None = option(
        None, "folder of a model to start from, of these sizes and any family; by default random"
    )
    isolate_documents: bool = option(
        False, "tokens do not attend to other documents packed into the same sequence"
    )
    remat: bool = option(False, "recompute layers in the backward pass, to save memory")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "hidden_size", "mlp_size", "num_layers", "num_heads", "num_kv_heads")
        if self.initial is not None:  # its head size may differ from hidden_size / num_heads
            return
        if self.num_heads % self.num_kv_heads:
            heads = f"--num-heads {self.num_heads}"
            raise ValueError(f"--num-kv-heads is {self.num_kv_heads}; it must divide {heads}")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"--hidden-size is {self.hidden_size}; twice --num-heads {self.num_heads} must "
                "divide it, since rotary positions rotate pairs of a head's dimensions"
            )


SIZES = ("hidden_size", "mlp_size", "num_layers", "num_heads", "num_kv_heads")


class StudentOptions(Protocol):
    """The options of a job that trains a model: `ModelOptions` and two of the loop's options."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def mlp_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def initial(self) -> str | None: ...

    @property
    def remat(self) -> bool: ...

    @property
    def sequence_length(self) -> int: ...

    @property
    def seed(self) -> int: ...


def make_model(options: StudentOptions, vocab_size: int) -> LinenModel:
    """The model in the folder `--initial`, or a new Llama-type model with tied embeddings.

    It multiplies in bfloat16.

    Raises:
      ValueError: the folder's model has other sizes, or cannot read `--sequence-length` tokens.
    """
    if options.initial is None:
        config = _new(options, vocab_size)
    else:
        config = _initial(options, options.initial)
    return LinenModel(Transformer(config, mixed_dot_general, remat=options.remat))


def _new(options: StudentOptions, vocab_size: int) -> TransformerConfig:
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


def _initial(options: StudentOptions, initial: str) -> TransformerConfig:
    """The configuration in the folder `--initial`, with room for `--sequence-length` tokens."""
    origin, config = f"--initial {initial}", read_config(find_folder(initial))[2]
    matching(options, config, origin, *SIZES)
    if options.sequence_length <= config.max_positions:
        return config
    ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
    # Learned positions end with their table, and a RoPE scaling is made for one context length.
    if config.position_offset is not None or any(rope and rope.kind != "default" for rope in ropes):
        raise ValueError(
            f"--sequence-length is {options.sequence_length}; {origin} reads at most "
            f"{config.max_positions} tokens, and its positions cannot be extended"
        )
    return dataclasses.replace(config, max_positions=options.sequence_length)


def check_initial(
    options: ModelOptions, words: tokenizers.Tokenizer | None, size: int, whose: str, cure: str
) -> None:
    """Check that the folder `--initial` has the vocabulary of the job, before it is loaded.

    Args:
      options: the options of the job.
      words: the job's tokenizer; None: nothing is checked.
      size: size of the job's vocabulary, padding included.
      whose: for the message, what the job's vocabulary belongs to.
      cure: for the message, what to do if the folder has other tokens.

    Raises:
      ValueError: the folder has other tokens, or another number of them.
    """
    if options.initial is None or words is None:
        return
    folder = find_folder(options.initial)
    path, own_size = folder / "tokenizer.json", read_json(folder / "config.json").get("vocab_size")
    own = read_tokenizer(path) if path.exists() else words
    if own_size != size or vocabulary_digest(own) != vocabulary_digest(words):
        raise ValueError(
            f"--initial {options.initial} has other tokens ({own.get_vocab_size()}, in a "
            f"vocabulary of {own_size}) than {whose} ({words.get_vocab_size()}, in one of {size}): "
            f"{cure}, or leave it out"
        )


def initial_params(model: LinenModel, options: StudentOptions, mesh: Mesh | None = None) -> Arrays:
    """The parameters in the folder `--initial`, or random ones from `--seed`.

    On a mesh, each device makes or reads its own part.
    """
    key = jax.random.key(options.seed)
    if options.initial is None:
        at = None if mesh is None else shardings(model, mesh, TRAINING_RULES)
        return jax.jit(model.init, out_shardings=at)(key)
    loaded = load(options.initial, "float32", mesh=mesh, rules=TRAINING_RULES)
    return {name: loaded.params[name] for name in jax.eval_shape(model.init, key)}


def read(model: LinenModel, params: Arrays, inputs: Array, end: int | None = None) -> Array:
    """The hidden states [B * T, E] of a batch [B, T] of packed text.

    `end` is the token that starts a document.  With it, each document is read on its own.
    """
    positions, mask = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape), None
    if end is not None:
        positions, mask = isolate(inputs == end)
    hidden = model.apply(params, inputs, positions, None, mask).hidden
    return hidden.reshape(-1, hidden.shape[-1])


def isolate(starts: Array) -> tuple[Array, Array]:
    """Positions and attention mask of packed documents that do not see each other.

    Args:
      starts: [B, T] bool, True at the first token of a document.

    Returns:
      Positions [B, T], which start at 0 in each document, and a mask [B, T, T], causal within it.
    """
    slot = jnp.arange(starts.shape[1])
    first = jax.lax.cummax(jnp.where(starts, slot, 0), axis=1)
    return slot - first, (slot[:, None] >= slot) & (first[:, :, None] == first[:, None])


def save_student(
    folder: pathlib.Path,
    model: LinenModel,
    params: Arrays,
    words: tokenizers.Tokenizer,
    eos: tuple[int, ...],
) -> None:
    """Write a Hugging Face folder in bfloat16.

    Args:
      folder: the folder.
      model: the model.
      params: its parameters.
      words: its tokenizer.
      eos: its EOS ids; () for none.
    """
    save(LanguageModel(model, params, words, eos, folder.name), folder, dtype=jnp.bfloat16)
