"""python -m experiments.wider: a wider model that computes the same function, to train further.

New hidden dimensions are read by random weights and written by zeros alone: they are zero until
training writes them (Net2Net, arXiv 1511.05641, with zeros in the place of copies).  An RMS norm
divides by the mean of more squares, so its scales and its epsilon become smaller.  Training then
goes on with `python -m train.pretrain --initial FOLDER`, or with `python -m train.drafter
--initial FOLDER` for an EAGLE-3 head.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import tyro
from safetensors.flax import load_file  # numpy alone has no bfloat16
from safetensors.numpy import save_file


@dataclasses.dataclass(frozen=True)
class Options:
    """Make a wider model of the Llama family, or widen the inputs of an EAGLE-3 head for it."""

    model: pathlib.Path
    """folder of the model, or of the head"""
    out: pathlib.Path
    """folder of the wider one"""
    hidden_size: int = 512
    """size of the hidden states"""
    mlp_size: int = 1408
    """size of an MLP's hidden layer"""
    num_heads: int = 8
    """query heads"""
    num_kv_heads: int = 4
    """key and value heads"""
    like: pathlib.Path | None = None
    """for a head: the folder of its narrow target, whose embeddings the head keeps"""
    seed: int = 0
    """seed of the new weights"""


def widened(
    weights: dict[str, np.ndarray], config: dict, options: Options
) -> tuple[dict[str, np.ndarray], dict]:
    """Returns the weights and the configuration of a wider Llama with the same function."""
    narrow, head = config["hidden_size"], config["head_dim"]
    if options.hidden_size < narrow or options.mlp_size < config["intermediate_size"]:
        raise ValueError(
            f"the model is wider already: its hidden states have {narrow} numbers and its MLPs "
            f"{config['intermediate_size']}; pass a --hidden-size and an --mlp-size of as much"
        )
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    if options.num_heads != groups * options.num_kv_heads:
        raise ValueError(
            f"num_heads={options.num_heads}; pass {groups} for each of the "
            f"{options.num_kv_heads} key heads, as the model has"
        )
    rng, scale = np.random.default_rng(options.seed), np.sqrt(narrow / options.hidden_size)
    sizes = {
        "gate_proj": (options.mlp_size, options.hidden_size),
        "up_proj": (options.mlp_size, options.hidden_size),
        "down_proj": (options.hidden_size, options.mlp_size),
        "q_proj": (options.num_heads * head, options.hidden_size),
        "k_proj": (options.num_kv_heads * head, options.hidden_size),
        "v_proj": (options.num_kv_heads * head, options.hidden_size),
        "o_proj": (options.hidden_size, options.num_heads * head),
    }
    made = {}
    for name, old in weights.items():
        kind = name.split(".")[-2]
        if kind.endswith("norm"):
            new = np.full(options.hidden_size, scale * old.mean(), np.float32)
            new[:narrow] = scale * old
        else:
            outputs, inputs = old.shape
            if kind == "embed_tokens":
                new = np.zeros((outputs, options.hidden_size), np.float32)
            elif kind in ("down_proj", "o_proj"):
                new = np.zeros(sizes[kind], np.float32)
            else:
                new = rng.normal(0, old.std(), sizes[kind]).astype(np.float32)
                new[:outputs, inputs:] *= 0.5  # less noise, once training writes these inputs
            new[:outputs, :inputs] = old
        made[name] = new
    return made, {
        **config,
        "hidden_size": options.hidden_size,
        "intermediate_size": options.mlp_size,
        "num_attention_heads": options.num_heads,
        "num_key_value_heads": options.num_kv_heads,
        "rms_norm_eps": float(config["rms_norm_eps"] * scale**2),
    }


def widened_head(
    weights: dict[str, np.ndarray], config: dict, embeddings: np.ndarray, options: Options
) -> tuple[dict[str, np.ndarray], dict]:
    """Returns an EAGLE-3 head that reads the wider target's states, with embeddings of its own."""
    narrow, old = embeddings.shape[1], weights["fc.weight"]
    split = old.reshape(len(old), -1, narrow)  # by the layers that it reads
    rng = np.random.default_rng(options.seed)
    new = rng.normal(0, old.std() / 2, (*split.shape[:2], options.hidden_size)).astype(np.float32)
    new[:, :, :narrow] = split
    made = {"fc.weight": new.reshape(len(old), -1), "embed_tokens.weight": embeddings}
    return {**weights, **made}, {**config, "target_hidden_size": options.hidden_size}


def read(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a folder; 16-bit ones as float32."""
    tensors = load_file(folder / "model.safetensors")
    wide = {"bfloat16": np.float32}
    return {name: np.asarray(x, wide.get(str(x.dtype))) for name, x in tensors.items()}


def main(options: Options) -> None:
    config = json.loads((options.model / "config.json").read_text())
    weights = read(options.model)
    if options.like is None:
        made, config = widened(weights, config, options)
    else:
        table = read(options.like)["model.embed_tokens.weight"]
        made, config = widened_head(weights, config, table, options)
    options.out.mkdir(parents=True)
    dtypes = {"dtype": "float32", "torch_dtype": "float32"}
    (options.out / "config.json").write_text(json.dumps({**config, **dtypes}, indent=2) + "\n")
    save_file(made, options.out / "model.safetensors")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (options.model / name).exists():
            shutil.copy(options.model / name, options.out / name)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
