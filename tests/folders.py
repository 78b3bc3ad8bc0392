"""Small Llama folders that the tests load, made once per session with transformers."""

from __future__ import annotations

import atexit
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
import safetensors.torch
import tokenizers
import torch
import transformers

import specjax

END = "<|endoftext|>"
TEXT = "the cat sat on the mat and the dog ate the hat of that cat, then the rat ran to the den "

_root = tempfile.TemporaryDirectory(prefix="specjax-tests-")
atexit.register(_root.cleanup)
ROOT = pathlib.Path(_root.name)

transformers.utils.logging.disable_progress_bar()


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


def random_llama(seed: int = 0, noise: float = 0.0, **config) -> transformers.LlamaForCausalLM:
    """A model with random weights, including biases and norms; `noise` scales other random
    numbers."""
    shape = {
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.15,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**shape, **config})).eval()
    with torch.no_grad():
        for name, leaf in model.named_parameters():
            if leaf.ndim == 1:
                leaf.normal_(0.0 if name.endswith("bias") else 1.0, 0.3)
        for leaf in model.parameters():
            leaf.add_(noise * leaf.std() * torch.randn_like(leaf))
    return model


def write(
    model: transformers.LlamaForCausalLM, name: str, tokens: bool = True, **save
) -> pathlib.Path:
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
    model.resize_token_embeddings(304)
    return write(model, "draft")


@functools.cache
def padded() -> pathlib.Path:
    """The target with more vocabulary padding."""
    model = random_llama(1, initializer_range=0.5, max_position_embeddings=512)
    model.resize_token_embeddings(352, mean_resizing=False)
    return write(model, "padded")


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
    with torch.no_grad():
        for name, leaf in model.named_parameters():
            leaf.fill_(1.0 if "norm" in name else 0.0)
        meanings = torch.nn.functional.normalize(torch.randn(size, 64), dim=1)
        model.get_input_embeddings().weight.copy_(meanings)
        for before, after in zip(ids, ids[1:] + ids[:1], strict=True):
            model.lm_head.weight[after] = meanings[before]
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


def change_tensors(
    folder: pathlib.Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    """Let `change` modify the tensors of a folder."""
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


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
