"""LoRA folders as PEFT writes them, over a Llama or a family of `product/test_families.py`."""

from __future__ import annotations

import json

import folders
import numpy as np
import safetensors.numpy

NAMES = {  # family -> modules of layer 1 that change, and whether each is stored as [in, out]
    "qwen3": {"self_attn.q_proj": False, "mlp.down_proj": False},
    "phi3": {"self_attn.qkv_proj": False, "mlp.gate_up_proj": False},
    "gpt2": {"attn.c_attn": True, "mlp.c_proj": True},
    "llama": {"self_attn.v_proj": False, "mlp.up_proj": False},
}
ROOTS = {"gpt2": "transformer.h.1"}
RANK = 3


def base(family):
    if family == "llama":
        return folders.target()
    from test_families import CONFIGS, make

    return make(family, next(iter(CONFIGS[family])))[1]


def tensors(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


def write(folder, arrays, **config):
    """An adapter's folder as PEFT writes it."""
    folder.mkdir()
    plain = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": 5, "bias": "none", "use_rslora": False,
        "fan_in_fan_out": False, "base_model_name_or_path": "org/base", "use_dora": False,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps({**plain, **config}))
    safetensors.numpy.save_file(arrays, folder / "adapter_model.safetensors")
    return folder


def pair(rng, rows, columns, rank=RANK):
    return (
        rng.normal(size=(rank, columns)).astype(np.float32),
        rng.normal(size=(rows, rank)).astype(np.float32),
    )


def adapter(folder, family, scale=5 / RANK, **config):
    """Random changes of two matrices of layer 1, and the folder's tensors with them merged."""
    merged, arrays, rng = tensors(base(family)), {}, np.random.default_rng(1)
    for name, turned in NAMES[family].items():
        module = f"{ROOTS.get(family, 'model.layers.1')}.{name}"
        rows, columns = merged[f"{module}.weight"].shape[:: -1 if turned else 1]
        a, b = pair(rng, rows, columns)
        arrays[f"base_model.model.{module}.lora_A.weight"] = a
        arrays[f"base_model.model.{module}.lora_B.weight"] = b
        change = scale * (b.astype(np.float64) @ a)
        merged[f"{module}.weight"] = merged[f"{module}.weight"] + (change.T if turned else change)
    return write(folder, arrays, **config), merged
