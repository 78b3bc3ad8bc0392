"""Cases of model folders: configurations, headers of weights, and indices."""

from __future__ import annotations

import json
import math
import pathlib
import random
import struct
from collections.abc import Callable

import jax
import jax.numpy as jnp

import specjax
from tests.fuzz import bases, values
from tests.fuzz.damaged import Damaged
from tests.fuzz.law import Case

LARGE = 1e6
"""Honest weights are smaller by far, and larger ones may overflow in a product of two."""

_SINGLE = "model.safetensors"
_CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json")
_OWN = {
    "max_window_layers": 1, "sliding_window": 8, "use_sliding_window": True, "mlp_only_layers": [0],
    "decoder_sparse_step": 1, "layer_types": ["sliding_attention"], "no_rope_layers": [0],
    "no_rope_layer_interval": 2, "sliding_window_pattern": 2, "partial_rotary_factor": 0.5,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_local_base_freq": 1e4,
    "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4},
    "original_max_position_embeddings": 32, "eos_token_id": [0, 1], "auto_map": {},
    "mlp_bias": True, "quantization_config": {}, "attention_bias": True, "hidden_act": "gelu",
    "n_inner": 12,
    "query_pre_attn_scalar": 4, "final_logit_softcapping": 3.0, "word_embed_proj_dim": 4,
    "do_layer_norm_before": False, "rotary_pct": 0.5, "norm_topk_prob": True, "head_dim": 4,
}  # fmt: skip
"""Fields that the families read, which the honest files may lack."""


def check_model(model: object) -> None:
    """Every parameter is there."""
    assert isinstance(model, specjax.LanguageModel)
    assert model.num_params > 0


def check_logits(model: object) -> None:
    """The logits are finite too.

    Loading takes a weight of 3e38, which is a number like any other.  A product with it may
    overflow, so such a model is left out.
    """
    check_model(model)
    assert isinstance(model, specjax.LanguageModel)
    if any(bool((jnp.abs(leaf) > LARGE).any()) for leaf in jax.tree.leaves(model.params)):
        return
    config = model.model.module.config
    tokens = jnp.arange(6, dtype=jnp.int32)[None] % config.vocab_size
    tokens = tokens[:, : config.max_positions]
    logits = model.model.apply(model.params, tokens, jnp.arange(tokens.shape[1])[None]).logits
    assert logits.shape[-1] == config.vocab_size, "the logits have another shape"
    assert bool(jnp.isfinite(logits).all()), "the logits are not finite"


def check_of(rng: random.Random) -> Callable[[object], None]:
    """How a model is checked: now and then by its logits, which takes longer.

    The seed of the case decides, so that the case can be repeated.
    """
    return check_logits if rng.random() < 1 / 16 else check_model


class Configurations:
    """JSON files of a model's folder with changed, missing and hostile fields."""

    def __init__(self, root: pathlib.Path) -> None:
        (root / "outside").mkdir()
        self.homes = [
            Damaged(bases.write(family, root / family), root / "outside")
            for family in specjax.FAMILIES
        ]
        for home in self.homes:  # else every case would be refused for what the family lacks
            specjax.load(home.folder)

    def case(self, rng: random.Random) -> Case:
        home = rng.choice(self.homes)
        home.reset()
        refused = False
        name = rng.choice(_CONFIGS[:1] * 12 + _CONFIGS)
        if rng.random() < 0.02:
            refused = home.strange(rng, name) and name in _CONFIGS
        else:
            config = json.loads(home.files[name])
            if name == "config.json" and rng.random() < 0.4:
                for field in rng.sample(sorted(_OWN), rng.randrange(1, 3)):
                    config[field] = (
                        values.changed(rng, [_OWN[field]])
                        if rng.random() < 0.3
                        else (values.near(rng, _OWN[field]) if rng.random() < 0.5 else _OWN[field])
                    )
            config = values.changed(rng, config, rng.choice((0, 1, 1, 2, 3)))
            home.put(name, values.text_of(rng, config))
        return Case(lambda: specjax.load(home.folder), (str(home.folder),), check_of(rng), refused)


def _parts(content: bytes) -> tuple[dict, bytes]:
    """The header of a safetensors file, and its data."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def changed_weights(rng: random.Random, content: bytes) -> bytes:
    """A safetensors file with a hostile header, or other data."""
    header, data = _parts(content)
    act = rng.random()
    name = rng.choice([name for name in header if name != "__metadata__"])
    if act < 0.45:
        field = rng.choice(("shape", "dtype", "data_offsets"))
        if field == "shape":
            shape = list(header[name]["shape"])
            header[name]["shape"] = rng.choice(
                (
                    shape[::-1],
                    [*shape, 1],
                    shape[:-1],
                    [0, 2**62],
                    [math.prod(shape)],
                    [-1],
                    [2**64],
                )
            )
        elif field == "dtype":
            header[name]["dtype"] = rng.choice(
                ("BF16", "F16", "F64", "I8", "F8_E4M3", "x", 5, None)
            )
        else:
            begin, end = header[name]["data_offsets"]
            header[name]["data_offsets"] = rng.choice(
                ([end, begin], [begin, end + 4], [begin - 4, end], [0, 2**63], [begin], "x")
            )
    elif act < 0.6:
        header = values.changed(rng, header, rng.choice((1, 2)))
    elif act < 0.7:
        header[rng.choice(("extra", "", "../x", "\x00", "model.layers.9.x"))] = dict(header[name])
    elif act < 0.75:
        header[name]["unknown"] = values.some(rng)
    elif act < 0.8:
        header.pop(name)
    elif act < 0.9:
        at = rng.randrange(len(data) // 4) * 4
        bad = struct.pack("<f", rng.choice((math.nan, math.inf, -math.inf, 3e38)))
        data = data[:at] + bad + data[at + 4 :]
    text = json.dumps(header).encode()
    if 0.9 < act < 0.95:
        text = values.damaged(rng, text)
    length = len(text)
    if act > 0.98:
        length = rng.choice((0, 1, 2**25, 2**27, 2**62, 2**64 - 1, length - 1, length + 1))
    made = length.to_bytes(8, "little") + text + data
    return made[: rng.randrange(len(made))] if 0.96 < act < 0.98 else made


class Headers:
    """Weights whose header or data is not what it should be."""

    def __init__(self, root: pathlib.Path) -> None:
        (root / "outside").mkdir()
        self.homes = [
            Damaged(bases.write(family, root / family), root / "outside")
            for family in ("llama", "gpt2", "phi3", "mixtral")
        ]

    def case(self, rng: random.Random) -> Case:
        home = rng.choice(self.homes)
        home.reset()
        refused = False
        if rng.random() < 0.03:
            refused = home.strange(rng, _SINGLE)
        else:
            home.put(_SINGLE, changed_weights(rng, home.files[_SINGLE]))
        return Case(lambda: specjax.load(home.folder), (str(home.folder),), check_of(rng), refused)


class Indices:
    """Indices of shards: other names, other maps, and shards that are missing or elsewhere."""

    def __init__(self, root: pathlib.Path) -> None:
        outside, folder = root / "outside", bases.write("llama", root / "llama")
        outside.mkdir()
        header, data = _parts((folder / _SINGLE).read_bytes())
        header.pop("__metadata__", None)
        names = sorted(header)
        self.map = {}
        for shard in range(2):
            own, content = {}, b""
            for name in names[shard::2]:
                begin, end = header[name]["data_offsets"]
                offsets = [len(content), len(content) + end - begin]
                own[name] = {**header[name], "data_offsets": offsets}
                content += data[begin:end]
                self.map[name] = f"model-0000{shard + 1}-of-00002.safetensors"
            text = json.dumps(own).encode()
            whole = len(text).to_bytes(8, "little") + text + content
            for place in (folder, outside):
                (place / f"model-0000{shard + 1}-of-00002.safetensors").write_bytes(whole)
        (folder / _SINGLE).unlink()
        self.index = f"{_SINGLE}.index.json"
        (folder / self.index).write_text(json.dumps({"metadata": {}, "weight_map": self.map}))
        self.home = Damaged(folder, outside)

    def case(self, rng: random.Random) -> Case:
        home, refused = self.home, False
        home.reset()
        index = {"metadata": {"total_size": 1}, "weight_map": dict(self.map)}
        name, shard = rng.choice(sorted(self.map)), rng.choice(sorted(set(self.map.values())))
        act = rng.random()
        if act < 0.35:
            elsewhere = (
                f"../outside/{shard}", str(home.outside / shard), f"./{shard}", "..", ".", "", "~",
                f"../llama/{shard}", f"{shard}\x00", "/dev/zero", "x" * 300 + ".safetensors",
                f"sub/../{shard}", f"..\\outside\\{shard}", "\ud800.safetensors",
            )  # fmt: skip
            for place in rng.choice(([name], [n for n in self.map if self.map[n] == shard])):
                index["weight_map"][place] = rng.choice(elsewhere)
            refused = True
        elif act < 0.7:
            index = values.changed(rng, index, rng.choice((1, 2)))
        elif act < 0.8:
            home.put(shard, changed_weights(rng, home.files[shard]))
        elif act < 0.9:
            refused = home.strange(rng, rng.choice((shard, self.index)))
        if act < 0.7:
            home.put(self.index, values.text_of(rng, index))
        return Case(lambda: specjax.load(home.folder), (str(home.folder),), check_of(rng), refused)
