"""Folders of small random models of the families, with a random MTP layer beside their layers."""

from __future__ import annotations

import functools
import pathlib
import shutil

import folders
import small_families
from safetensors.numpy import load_file, save_file

NAMES = {
    "qwen": (
        "mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden",
        "mtp.norm",
    ),
    "deepseek": (
        "model.layers.{}.", "model.layers.{}.eh_proj", "model.layers.{}.enorm",
        "model.layers.{}.hnorm", "model.layers.{}.shared_head.norm",
    ),
    "ernie": (
        "model.mtp_block.0.", "model.mtp_linear_proj.0", "model.mtp_emb_norm.0",
        "model.mtp_hidden_norm.0",
    ),
    "nemotron": (
        "mtp.layers.0.", "mtp.layers.0.eh_proj", "mtp.layers.0.enorm", "mtp.layers.0.hnorm",
        "mtp.layers.1.final_layernorm",
    ),
    "mimo": (
        "model.mtp_layers.0.", "model.mtp_layers.0.input_proj",
        "model.mtp_layers.0.token_layernorm", "model.mtp_layers.0.hidden_layernorm",
        "model.mtp_layers.0.final_layernorm",
    ),
}  # fmt: skip
"""Layout -> the beginning of the decoder layer's names, the matrix, and the norms."""


@functools.cache
def beside(plain: pathlib.Path) -> pathlib.Path:
    """A copy of a folder with a random MTP layer in Qwen's layout, like its first layer."""
    made = folders.ROOT / f"beside-{plain.name}"
    shutil.copytree(plain, made, dirs_exist_ok=True)
    tensors = load_file(plain / "model.safetensors")
    block, project, *norms = NAMES["qwen"]
    size = tensors["model.norm.weight"].shape[0]
    first = "model.layers.0."
    shapes = {
        block + name.removeprefix(first): tensor.shape
        for name, tensor in tensors.items()
        if name.startswith(first)
    }
    shapes |= {f"{project}.weight": (size, 2 * size), **{f"{n}.weight": (size,) for n in norms}}
    kind = tensors["model.norm.weight"].dtype
    added = {
        name: small_families.tensor("beside", name, shape).astype(kind)
        for name, shape in shapes.items()
    }
    save_file({**tensors, **added}, made / "model.safetensors", {"format": "pt"})
    return made


def blocks(layout: str, block: str, like: int) -> dict[str, str]:
    """The beginnings of an MTP layer's names -> those of the model's layer that it is like."""
    if layout == "nemotron":  # its feed-forward part is a block of its own
        return {block: f"backbone.layers.{like}.", "mtp.layers.1.": f"backbone.layers.{like + 1}."}
    return {block: f"model.layers.{like}."}


@functools.cache
def folder(case: str, layout: str, like: int, copies: bool = False, count: int = 1) -> pathlib.Path:
    """The folder of a case of `small_families` with MTP layers.

    Args:
      case: of the model.
      layout: whose names the layer has.
      like: the model's layer that has tensors of the same shapes.
      copies: the file repeats the target's embedding and head, as DeepSeek's do.
      count: the number of MTP layers.
    """
    plain = small_families.folder(case)
    config = small_families.stored()[0][case]["config"]
    tensors = load_file(plain / "model.safetensors")
    depth = config.get("num_hidden_layers") or len(config["layers_block_type"])
    size = config["hidden_size"]
    added = {}
    for k in range(count):
        block, project, *norms = (name.format(depth + k) for name in NAMES[layout])
        shapes = {}
        for stem, theirs in blocks(layout, block, like).items():
            shapes |= {
                stem + name.removeprefix(theirs): tensor.shape
                for name, tensor in tensors.items()
                if name.startswith(theirs)
            }
        shapes[f"{project}.weight"] = (size, 2 * size)
        shapes |= {f"{norm}.weight": (size,) for norm in norms}
        added |= {
            name: small_families.tensor(f"{case} mtp", name, shape)
            for name, shape in shapes.items()
        }
        if copies:
            added[f"{block}embed_tokens.weight"] = tensors["model.embed_tokens.weight"] + 1
            added[f"{block}shared_head.head.weight"] = tensors["model.embed_tokens.weight"] + 1
    made = folders.ROOT / f"mtp-{layout}-{like}-{copies}-{count}-{plain.name}"
    folders.Llama(config, {**tensors, **added}).save_pretrained(made)
    return made
