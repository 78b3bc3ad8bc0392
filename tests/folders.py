"""Small Llama folders that the tests load, made once per session from a seed.

`transformers_folders.py` has models of transformers with such weights.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import counted
import jax
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

import specjax

END = "<|endoftext|>"
TEXT = "the cat sat on the mat and the dog ate the hat of that cat, then the rat ran to the den "

_root = tempfile.TemporaryDirectory(prefix="specjax-tests-")
atexit.register(_root.cleanup)
ROOT = pathlib.Path(_root.name)


@functools.cache
def tokenizer_file(vocab_size: int = 320, name: str = "tokenizer") -> pathlib.Path:
    """Byte-level BPE with <|endoftext|> as id 0: the 256 bytes, and merges learned from TEXT."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT] * 8, trainer)
    file = ROOT / f"{name}-{vocab_size}.json"
    made.save(str(file))
    return file


def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(tokenizer_file()))


@dataclasses.dataclass
class Llama:
    """A Llama with its tensors by their published names; specjax and transformers read it."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]

    def save_pretrained(self, folder: pathlib.Path, max_shard_size: str = "5000KB") -> None:
        """Write the files that transformers would write."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2))
        ids = {name: self.config[name] for name in ("bos_token_id", "eos_token_id")}
        (folder / "generation_config.json").write_text(json.dumps(ids))
        most, shards = 1000 * int(max_shard_size.removesuffix("KB")), [{}]
        for name, tensor in self.tensors.items():
            if shards[-1] and sum(x.nbytes for x in shards[-1].values()) + tensor.nbytes > most:
                shards.append({})
            shards[-1][name] = tensor
        if len(shards) == 1:
            save_tensors(shards[0], folder / "model.safetensors")
            return
        places = {}
        for n, shard in enumerate(shards):
            file = f"model-{n + 1:05}-of-{len(shards):05}.safetensors"
            save_tensors(shard, folder / file)
            places |= dict.fromkeys(shard, file)
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def resized(self, rows: int) -> Llama:
        """The same model with another number of rows in its embedding and its head."""
        tensors, rng = dict(self.tensors), np.random.default_rng(9)
        for name in {"model.embed_tokens.weight", "lm_head.weight"} & set(tensors):
            had = tensors[name]
            more = had.std() * rng.standard_normal((rows, had.shape[1]), np.float32)
            tensors[name] = np.concatenate([had, more])[:rows] if rows > len(had) else had[:rows]
        return Llama({**self.config, "vocab_size": rows}, tensors)


def save_tensors(tensors: dict[str, np.ndarray], file: pathlib.Path) -> None:
    whole = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    safetensors.numpy.save_file(whole, file, metadata={"format": "pt"})


SAVED = {
    "float32": {},
    "bfloat16": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim": {"head_dim": 6},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}
"""Configurations of a small Llama that are saved and read again."""


def random_llama(seed: int = 0, noise: float = 0.0, **config: Any) -> Llama:
    """A model with random weights, including biases and norms; `noise` scales other random
    numbers."""
    c = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 0, "dtype": "float32", "eos_token_id": 0, "hidden_act": "silu",
        "hidden_size": 48, "initializer_range": 0.15, "intermediate_size": 64,
        "max_position_embeddings": 1024, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "pad_token_id": None, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False, "use_cache": True, "vocab_size": 320, **config,
    }  # fmt: skip
    c.setdefault("head_dim", c["hidden_size"] // c["num_attention_heads"])
    wide, mlp = c["hidden_size"], c["intermediate_size"]
    queries, keys = (c["head_dim"] * c[f"num_{n}_heads"] for n in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], wide)}
    for layer in range(c["num_hidden_layers"]):
        linear = {
            "self_attn.q_proj": (queries, wide), "self_attn.k_proj": (keys, wide),
            "self_attn.v_proj": (keys, wide), "self_attn.o_proj": (wide, queries),
            "mlp.gate_proj": (mlp, wide), "mlp.up_proj": (mlp, wide), "mlp.down_proj": (wide, mlp),
        }  # fmt: skip
        for name, shape in linear.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            if c["attention_bias" if "attn" in name else "mlp_bias"]:
                shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (wide,)
    shapes["model.norm.weight"] = (wide,)
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], wide)
    rng, others, tensors = np.random.default_rng(seed), np.random.default_rng(seed + 100), {}
    for name, shape in shapes.items():
        drawn = rng.standard_normal(shape, np.float32)
        scale = 0.3 if len(shape) == 1 else np.float32(c["initializer_range"])
        tensors[name] = drawn * np.float32(scale) + np.float32("norm" in name)
        tensors[name] += noise * tensors[name].std() * others.standard_normal(shape, np.float32)
    return Llama(c, tensors)


def write(model: Llama, name: str, tokens: bool = True, **save: Any) -> pathlib.Path:
    """Save as transformers does, with our tokenizer beside it."""
    folder = ROOT / name
    model.save_pretrained(folder, **save)
    if tokens:
        (folder / "tokenizer.json").write_bytes(tokenizer_file().read_bytes())
    return folder


@functools.cache
def target() -> pathlib.Path:
    """A random model whose greedy text varies."""
    return write(random_llama(1, initializer_range=0.5, max_position_embeddings=512), "target")


@functools.cache
def draft() -> pathlib.Path:
    """The target with noisy weights (right now and then), less vocabulary padding and less
    context."""
    model = random_llama(1, noise=0.1, initializer_range=0.5, max_position_embeddings=256)
    return write(model.resized(304), "draft")


@functools.cache
def padded() -> pathlib.Path:
    """The target with more vocabulary padding."""
    model = random_llama(1, initializer_range=0.5, max_position_embeddings=512)
    return write(model.resized(352), "padded")


@functools.cache
def wordless() -> pathlib.Path:
    """The target without a tokenizer."""
    return write(
        random_llama(1, initializer_range=0.5, max_position_embeddings=512),
        "wordless",
        tokens=False,
    )


@functools.cache
def foreign() -> pathlib.Path:
    """A model with another tokenizer."""
    folder = write(random_llama(2, vocab_size=280), "foreign", tokens=False)
    (folder / "tokenizer.json").write_bytes(tokenizer_file(270).read_bytes())
    return folder


@functools.cache
def scribe(
    text: str, end: bool, words: tokenizers.Tokenizer | None = None, eos: int = 0
) -> pathlib.Path:
    """A model that writes `text` after its first token, repeatedly or up to `eos`.

    All tokens of the text must differ. Attention and MLP add nothing, and the head row of each
    token is the embedding of the token before it.
    """
    words = words or tokenizer()
    ids = words.encode(text).ids
    assert len(set(ids)) == len(ids), "a token appears twice"
    ids = [*ids, eos] if end else ids
    size = max(320, words.get_vocab_size())
    model = random_llama(3, hidden_size=64, num_hidden_layers=1, eos_token_id=eos, vocab_size=size)
    for name, tensor in model.tensors.items():
        tensor[...] = 1.0 if "norm" in name else 0.0
    meanings = np.random.default_rng(3).standard_normal((size, 64), np.float32)
    meanings /= np.linalg.norm(meanings, axis=1, keepdims=True)
    model.tensors["model.embed_tokens.weight"][...] = meanings
    for before, after in zip(ids, ids[1:] + ids[:1], strict=True):
        model.tensors["lm_head.weight"][after] = meanings[before]
    folder = write(model, f"scribe-{len(list(ROOT.iterdir()))}")
    words.save(str(folder / "tokenizer.json"))
    return folder


def edit(
    folder: pathlib.Path, file: str = "config.json", drop: tuple[str, ...] = (), **values
) -> pathlib.Path:
    """Change a JSON file of a folder."""
    content = json.loads((folder / file).read_text())
    content = {k: v for k, v in {**content, **values}.items() if k not in drop}
    (folder / file).write_text(json.dumps(content))
    return folder


def change_tensors(folder: pathlib.Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Let `change` modify the tensors of a folder."""
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    save_tensors(tensors, file)


def random_tokens(length: int, seed: int = 0, vocab_size: int = 320) -> np.ndarray:
    """[1, length] int32, without <|endoftext|>."""
    return np.random.default_rng(seed).integers(1, vocab_size, (1, length), dtype=np.int32)


def refused(error: type[Exception], folder: pathlib.Path, *words: str, **options: Any) -> str:
    """Check that `load` raises with every word in its message and compiles nothing."""
    jax.random.key(0)  # its own programs do not count
    before = counted.compilations()
    with pytest.raises(error) as caught:
        specjax.load(folder, **options)
    assert counted.compilations() == before
    assert [word for word in words if word not in str(caught.value)] == [], caught.value
    return str(caught.value)
