"""Read folders of Medusa heads as every engine's loader reads them.

The engines silently skip tensors that they do not know and leave missing heads random. So `READERS`
states again, from the loaders' source and independently of `HEAD_FORMATS`, which tensors each one
takes; here missing or extra tensors are an error.
"""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import torch

from specjax.methods.medusa.engines import Form, HeadTensors

E, V = 6, 10
HEAD = np.random.default_rng(9).normal(size=(V, E)).astype(np.float32)
OURS = {"choices": [[0], [1], [0, 0]], "acceptance": [0.5, 0.25, 0.125], "target": []}


def heads_of(layers, own, kind="bfloat16", size=E, vocab=V, repeated=False):
    """Three random heads under the authors' tensor names."""
    rng, tensors = np.random.default_rng(layers), {}
    for h in range(3):
        for k in range(layers):
            tensors[f"{h}.{k}.linear.weight"] = rng.normal(0, 0.3, size=(size, size))
            tensors[f"{h}.{k}.linear.bias"] = rng.normal(0, 0.3, size=size)
            if repeated and k:
                for end in ("weight", "bias"):
                    tensors[f"{h}.{k}.linear.{end}"] = tensors[f"{h}.0.linear.{end}"]
        if own:
            tensors[f"{h}.{layers}.weight"] = rng.normal(size=(vocab, size))
    cast = {name: tensor.astype(jnp.dtype(kind)) for name, tensor in tensors.items()}
    return HeadTensors(Form(3, layers, own, "some/target", OURS), cast)


# Each reader returns, per head, its blocks [(W, b), ...] and its map to the vocabulary.


def take(stored, wanted):
    """Take exactly the tensors of `wanted`, name -> shape, all of one floating type."""
    assert set(stored) == set(wanted)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == wanted
    assert len({str(tensor.dtype) for tensor in stored.values()}) == 1
    return stored


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def authors_heads(stored, heads, layers, own, prefix=""):
    wanted = {}
    for h, k in itertools.product(range(heads), range(layers)):
        wanted |= {f"{prefix}{h}.{k}.linear.weight": (E, E), f"{prefix}{h}.{k}.linear.bias": (E,)}
    wanted |= {f"{prefix}{h}.{layers}.weight": (V, E) for h in range(heads) if own}
    tensors = take(stored, wanted)
    return [
        (
            [
                (tensors[f"{prefix}{h}.{k}.linear.weight"], tensors[f"{prefix}{h}.{k}.linear.bias"])
                for k in range(layers)
            ],
            tensors[f"{prefix}{h}.{layers}.weight"] if own else None,
        )
        for h in range(heads)
    ]


def original_reader(folder):
    """The authors' loader: version is the string "2", and one block is repeated."""
    config = config_of(folder)
    assert config["base_model_name_or_path"]
    own = config.get("version") != "2"
    stored = safetensors.numpy.load_file(folder / "medusa_lm_head.safetensors")
    return authors_heads(stored, config["medusa_num_heads"], config["medusa_num_layers"], own)


def tgi_reader(folder):
    """TGI and LoRAX: LoRAX swaps adapters whose version is 2 or higher; version 2 has one block."""
    config = config_of(folder)
    assert config["base_model_name_or_path"]
    assert isinstance(config["version"], int | float)
    stored = safetensors.numpy.load_file(folder / "medusa_lm_head.safetensors")
    own = config["medusa_num_layers"] > 1 or f"0.{config['medusa_num_layers']}.weight" in stored
    assert own == (config["version"] < 2)
    assert own or config["medusa_num_layers"] == 1
    return authors_heads(stored, config["medusa_num_heads"], config["medusa_num_layers"], own)


def vllm_reader(folder):
    """vLLM: it counts by parts of key names and reads biases, and one map for all heads, on
    request."""
    config = config_of(folder)
    assert config["model_type"] == "medusa"
    assert config["architectures"] == ["MedusaModel"]
    heads = [config[key] for key in config if "num" in key and "heads" in key]
    layers = [
        config[key] for key in config if "num" in key and "layers" in key and "heads" not in key
    ]
    assert len(heads) == len(layers) == 1
    (heads,), (layers,) = heads, layers
    assert (config["hidden_size"], config["vocab_size"], config["truncated_vocab_size"]) == (
        E,
        V,
        V,
    )
    assert config["logit_scale"] == 1.0
    bias, shared = config.get("medusa_fc_bias", False), config.get("original_lm_head", False)
    files = sorted(folder.glob("*.safetensors"))
    stored = {}
    for file in files:
        for name, tensor in safetensors.numpy.load_file(file).items():
            stored[name.removeprefix("medusa_heads.")] = tensor
    wanted: dict[str, tuple[int, ...]] = {
        f"lm_heads.{h}.weight": (V, E) for h in range(1 if shared else heads)
    }
    for h, k in itertools.product(range(heads), range(layers)):
        wanted[f"blocks.{h}.layers.{k}.weight"] = (E, E)
        if bias:
            wanted[f"blocks.{h}.layers.{k}.bias"] = (E,)
    tensors = take(stored, wanted)
    return [
        (
            [
                (tensors[f"blocks.{h}.layers.{k}.weight"], tensors[f"blocks.{h}.layers.{k}.bias"])
                for k in range(layers)
            ],
            tensors[f"lm_heads.{0 if shared else h}.weight"],
        )
        for h in range(heads)
    ]


def tensorrt_reader(folder):
    """TensorRT-LLM: a pickle of tensors, counts from its command line, and a linear map per
    head."""
    config = config_of(folder)
    loaded = torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    assert len({tensor.data_ptr() for tensor in loaded.values()}) == len(loaded)
    stored = {name: as_numpy(tensor) for name, tensor in loaded.items()}
    return authors_heads(stored, config["medusa_num_heads"], config["medusa_num_layers"], True)


def optimizer_reader(folder):
    """Model-Optimizer, and TensorRT-LLM for checkpoints of Model-Optimizer."""
    counts = config_of(folder)["medusa"]
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    return authors_heads(
        stored, counts["num_medusa_heads"], counts["num_medusa_layers"], True, "medusa_heads."
    )


READERS = {
    "specjax": original_reader, "original": original_reader, "tgi": tgi_reader, "vllm": vllm_reader,
    "tensorrt-llm": tensorrt_reader, "model-optimizer": optimizer_reader,
}  # fmt: skip


def as_numpy(tensor):
    bits = tensor.contiguous().view(torch.uint8).numpy()
    return bits.view(jnp.dtype(str(tensor.dtype).removeprefix("torch.")))


def same_bits(one, other):
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert one.tobytes() == other.tobytes()
