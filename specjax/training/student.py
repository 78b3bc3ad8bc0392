"""The model that a job trains: its options, its pass over packed text, and saving it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import tokenizers
from jax import Array
from jax.sharding import Mesh

from specjax._internal.checks import settle
from specjax.files import (
    find_folder,
    load,
    read_config,
    read_json,
    read_outline,
    read_tokenizer,
    save,
)
from specjax.models import LanguageModel, LinenModel, Transformer, TransformerConfig
from specjax.options.fields import as_argument, matching, option
from specjax.parallel import TRAINING_RULES, shardings
from specjax.text import vocabulary_digest
from specjax.training.families import alike, cut, stretched
from specjax.training.loop import LoopOptions
from specjax.training.precision import mixed_dot_general
from specjax.training.trees import Tree
from specjax.types import ModelOutput, Weights

SIZES = ("hidden_size", "mlp_size", "num_layers", "num_heads", "num_kv_heads")


def _size(text: str) -> Any:
    """Returns the option of a size, whose help begins with a text."""
    return option(None, f"{text}, or as the model that it starts from or is like", "[1, inf)")


@dataclasses.dataclass(frozen=True)
class ModelOptions(LoopOptions):
    """The source and the sizes of a student, and the loop that trains it.

    Without a source it is a Llama-type model.
    """

    group = "model"

    hidden_size: int | None = _size("size of the hidden states; default: 256")
    mlp_size: int | None = _size("size of an MLP's hidden layer; default: 688")
    num_layers: int | None = _size("layers; default: 6")
    num_heads: int | None = _size("query heads; default: 4")
    num_kv_heads: int | None = _size("key and value heads; default: 2")
    initial: str | None = option(
        None, "folder of a model of any family that training continues; by default random weights"
    )
    like: str | None = option(
        None,
        "folder of a model whose family, positions and sizes a student with random weights has",
    )
    from_layers: tuple[int, ...] = option(
        (), "start from these layers of --like, with its embedding, final norm and output matrix"
    )
    isolate_documents: bool = option(
        False, "tokens do not attend to other documents packed into the same sequence"
    )
    remat: bool = option(False, "recompute layers in the backward pass, to save memory")

    new_sizes: ClassVar[Mapping[str, int]] = dict(zip(SIZES, (256, 688, 6, 4, 2), strict=True))
    """The sizes of a student without a source."""

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen = [as_argument(name, value) for name, value in self.sources.items()]
        layers, sizes = self.from_layers, self.new_model
        named, heads = as_argument("from_layers", layers), sizes["num_heads"]
        is_new = not chosen and self.model_like is None  # else it has the sizes of that model
        settle(
            (len(chosen) > 1, f"{' and '.join(chosen)} exclude each other: leave out all but one"),
            (
                layers and self.model_like is None,
                f"{named} needs --like with the folder of the model that has these layers",
            ),
            (
                min(layers, default=0) < 0 or len(set(layers)) < len(layers),
                f"{named}: name layers from 0, each once",
            ),
            (
                is_new and heads % sizes["num_kv_heads"],
                f"--num-kv-heads is {sizes['num_kv_heads']}; it must divide --num-heads {heads}",
            ),
            (
                is_new and sizes["hidden_size"] % (2 * heads),
                f"--hidden-size is {sizes['hidden_size']}; twice --num-heads {heads} must divide "
                "it, since rotary positions rotate pairs of a head's dimensions",
            ),
        )

    @property
    def sizes(self) -> dict[str, int | None]:
        """The requested sizes; None: as the model that it starts from or is like."""
        return {name: getattr(self, name) for name in SIZES}

    @property
    def sources(self) -> dict[str, object]:
        """The options that name a source of weights, of which there may be one."""
        given = {"initial": self.initial, "from_layers": self.from_layers}
        return {name: value for name, value in given.items() if value}

    @property
    def new_model(self) -> dict[str, int]:
        """The sizes of a model without a source."""
        return {name: getattr(self, name) or size for name, size in self.new_sizes.items()}

    @property
    def model_like(self) -> str | None:
        """The folder that `--like` names."""
        return self.like

    @property
    def start(self) -> Start | None:
        """The folder of the student's configuration or weights; None: it is a new Llama."""
        if self.initial is not None:
            return Start(self.initial, f"--initial {self.initial}")
        folder = self.model_like
        if folder is None:
            return None
        if self.from_layers:
            name = as_argument("from_layers", self.from_layers)
            return Start(folder, f"{name} of {folder}", layers=self.from_layers)
        return Start(folder, f"--like {folder}", has_weights=False)


@dataclasses.dataclass(frozen=True)
class Start:
    """A folder that a student comes from."""

    folder: str
    name: str  # the option that names it, for messages
    has_weights: bool = True  # the student starts with its weights; else it is only alike
    layers: tuple[int, ...] | None = None  # of the folder; None: all
    lora: str | None = None  # a LoRA that is merged into the weights


def make_model(options: ModelOptions, vocab_size: int, context: int | None = None) -> LinenModel:
    """Returns the model that a job trains, which multiplies in bfloat16.

    Args:
      options: the options of the job.
      vocab_size: of the job's vocabulary, padding included.
      context: tokens that the model should read, as the target does; by default
        `--sequence-length`.  A folder's own context stays, unless it is shorter and its positions
        can be extended.
    """
    context = max(options.sequence_length, context or 0)
    start = options.start
    if start is None:
        sizes = options.new_model
        config = TransformerConfig(
            vocab_size=vocab_size,
            hidden_size=sizes["hidden_size"],
            mlp_size=sizes["mlp_size"],
            num_layers=sizes["num_layers"],
            num_heads=sizes["num_heads"],
            num_kv_heads=sizes["num_kv_heads"],
            head_dim=sizes["hidden_size"] // sizes["num_heads"],
            max_positions=context,
            tied_embeddings=True,
        )
    else:
        config = read_config(find_folder(start.folder))[2]
        if start.layers is not None:
            config = cut(config, start.layers, start.name)
        if start.has_weights:
            given = tuple(name for name in SIZES if getattr(options, name) is not None)
            matching(options, config, start.name, *given)
            config = stretched(config, context)
        else:
            config = alike(options.sizes, config, vocab_size, context, start.name)
        if config.max_positions < options.sequence_length:
            raise ValueError(
                f"--sequence-length is {options.sequence_length}; {start.name} reads at most "
                f"{config.max_positions} tokens, and its positions cannot be extended"
            )
    return LinenModel(Transformer(config, mixed_dot_general, remat=options.remat))


Student = TypeVar("Student", bound=ModelOptions)


def no_wider(options: Student, target: TransformerConfig) -> Student:
    """Returns the options of a new draft whose default sizes are at most those of the target.

    A draft that costs as much as its target cannot make it faster.
    """
    if options.start is not None:
        return options
    sizes = options.new_model
    even = 2 * sizes["num_heads"]  # as for `ModelOptions`
    most = {
        "hidden_size": max(even, target.hidden_size // even * even),
        "mlp_size": target.mlp_size,
    }
    # Sizes that somebody asked for stay, and so do sizes that fit.
    found = {
        name: size
        for name, size in most.items()
        if getattr(options, name) is None and 0 < size < sizes[name]
    }
    if not found:
        return options
    words = " and ".join(as_argument(name, size) for name, size in found.items())
    print(f"the draft is no wider than the target: {words}", flush=True)
    return dataclasses.replace(options, **found)


def exit_of(
    draft: LinenModel, target: LanguageModel, layers: int
) -> tuple[LinenModel, tuple[str, ...]]:
    """Returns the first layers of a target as a draft, and the trained names: the final norm's.

    The layers and the output matrix are the target's own arrays, so they take no memory.  The
    proposer `early-exit` reads only the target's parameters, so it cannot use the trained norm, and
    the model is saved as an ordinary folder for `--draft`, which has a KV cache of its own.
    """
    network = target.model.module
    settle(
        (
            layers >= network.config.num_layers,
            f"--early-exit is {layers}; the target has {network.config.num_layers} layers: leave "
            "out at least the last one",
        ),
        (
            not network.config.final_norm,
            "--early-exit trains the norm before the output matrix, which this target lacks: pass "
            "--from-layers, which trains the layers",
        ),
    )
    module = draft.module.clone(transposed=network.transposed)
    return LinenModel(module), ("norm",)


def check_initial(
    start: Start | None,
    words: tokenizers.Tokenizer | None,
    size: int,
    whose: str,
    cure: str,
    one_size: str = "this job",
) -> None:
    """Raises ValueError if a folder with weights has other tokens than the job; nothing is loaded.

    The job has the tokenizer `words` and a vocabulary of `size`, padding included.  The message
    says `whose` they are, the `cure`, and with `one_size` which option needs an equal padding.
    """
    if start is None or not start.has_weights or words is None:
        return
    folder = find_folder(start.folder)
    path, own_size = folder / "tokenizer.json", read_json(folder / "config.json").get("vocab_size")
    own = read_tokenizer(path) if path.exists() else words
    # Without a tokenizer only an equal size says that the tokens are the same.
    unknown = own_size != size and not path.exists()
    is_other = unknown or vocabulary_digest(own) != vocabulary_digest(words)
    settle(
        (
            is_other,
            f"{start.name} has other tokens ({own.get_vocab_size()}, in a vocabulary of "
            f"{own_size}) than {whose} ({words.get_vocab_size()}, in one of {size}): {cure}, or "
            "leave it out",
        ),
        (
            not is_other and own_size != size and one_size,
            f"{start.name} has the tokens of {whose}, but its vocabulary is padded to {own_size} "
            f"and not to {size}, which {one_size} cannot take: leave one of the two out",
        ),
    )


def initial_params(model: LinenModel, options: ModelOptions, mesh: Mesh | None = None) -> Tree:
    """Returns the parameters that the student starts with: a folder's, or random ones.

    On a mesh, each device makes or reads its own part.
    """
    key, start = jax.random.key(options.seed), options.start
    if start is None or not start.has_weights:
        at = None if mesh is None else shardings(model, mesh, TRAINING_RULES)
        return jax.jit(model.init, out_shardings=at)(key)
    loaded = load(
        start.folder, "float32", mesh=mesh, rules=TRAINING_RULES, lora=start.lora,
        layers=start.layers, dequantise=True,
    )  # fmt: skip
    return {name: loaded.params[name] for name in jax.eval_shape(model.init, key)}


def read(
    model: LinenModel,
    params: Weights,
    inputs: Array,
    end: int | None = None,
    starts: Array | None = None,
) -> Array:
    """Returns the last hidden states [B * T, E] of packed text [B, T]; see `read_layers`."""
    hidden = read_layers(model, params, inputs, end, starts).hidden
    return hidden.reshape(-1, hidden.shape[-1])


def read_layers(
    model: LinenModel,
    params: Weights,
    inputs: Array,
    end: int | None = None,
    starts: Array | None = None,
    taps: tuple[int, ...] = (),
) -> ModelOutput:
    """Runs a pass over packed text [B, T], of which the layers `taps` give their outputs, too.

    Documents that start with the token `end`, and sequences that begin where `starts` [B, T] is 1,
    are read on their own.
    """
    positions, mask = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape), None
    documents = None if end is None else inputs == end
    if starts is not None:
        documents = starts if documents is None else starts | documents
    if documents is not None:
        positions, mask = isolate(documents)
    return model.apply(params, inputs, positions, None, mask, taps)


def isolate(starts: Array) -> tuple[Array, Array]:
    """Returns positions and attention mask of packed documents that do not see each other.

    `starts` [B, T] is True at the first token of a document.  Positions [B, T] start at 0 in each
    document, and the mask [B, T, T] is causal within it.
    """
    slot = jnp.arange(starts.shape[1])
    first = jax.lax.cummax(jnp.where(starts, slot, 0), axis=1)
    return slot - first, (slot[:, None] >= slot) & (first[:, :, None] == first[:, None])


def save_student(
    folder: pathlib.Path,
    model: LinenModel,
    params: Weights,
    words: tokenizers.Tokenizer,
    eos: tuple[int, ...],
    files: Mapping[str, bytes] | None = None,
    start: Start | None = None,
) -> None:
    """Writes a Hugging Face folder in bfloat16.

    Files of the tokenizer in `files` are written as they are.  With the weights of a `start`, the
    model keeps the folder's other files, too: the configuration as far as it is the same, the
    sampling defaults, and the tokenizer unless `files` has one.
    """
    made = LanguageModel(model, params, words, eos, folder.name, files=files or {})
    if start is not None and start.has_weights:
        origin = read_outline(start.folder)
        made = dataclasses.replace(
            made, defaults=origin.defaults, files={**origin.files, **made.files}
        )
    save(made, folder, dtype=jnp.bfloat16)
