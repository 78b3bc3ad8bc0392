"""What decoding on eight devices must be, for `tests/test_sharding.py`:  python tests/on_meshes.py

A process of its own, since a process has the devices that it starts with.  Every case decodes on one device and on
meshes, by the same functions; the compiled loop is then asked what it moves between devices, and what it keeps.
"""

import dataclasses
import math
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.decoding import Decoder, _run
from specjax.models.medusa import MedusaHeads
from specjax.proposers import MedusaParams
from specjax.sharding import beside, lay, layout, make_mesh
from specjax.types import DecodeState, Params

VOCAB, ROWS, WIDTH, CAPACITY = 32, 8, 8, 256
LENGTHS = np.array([5, 3, 6, 1, 8, 2, 7, 4], np.int32)
PROMPTS = np.random.default_rng(0).integers(1, VOCAB, (ROWS, WIDTH)).astype(np.int32)
LIMITS = LENGTHS + np.array([24, 18, 9, 20, 1, 0, 22, 16], np.int32)

MESHES = ((1, 8), (2, 4), (4, 2), (8, 1))


def transformer(kv_heads: int = 8, **switches: Any) -> specjax.LinenModel:
    config = specjax.TransformerConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        mlp_size=128,
        num_layers=1,
        num_heads=8,
        num_kv_heads=kv_heads,
        head_dim=8,
        max_positions=CAPACITY,
        init_scale=0.35,
    )
    return specjax.LinenModel(specjax.Transformer(dataclasses.replace(config, **switches)))


def noisy(params: Any, noise: float = 0.03) -> Any:
    """A copy that agrees often, but not always."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    new = [x + noise * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, new)


@dataclasses.dataclass
class Case:
    """A decoder, its arrays on one device, and where it is tried."""

    decoder: Decoder
    params: Params
    meshes: tuple[tuple[int, int], ...]
    split_draft: bool = True
    temperature: float = 1.0

    def on(self, mesh: Any) -> Params:
        target = lay(self.decoder.target, self.params.target, mesh)
        model = getattr(self.decoder.proposer, "model", None)
        if model is None or not self.split_draft:
            return Params(target, beside(self.params.proposer, mesh))
        return Params(target, lay(model, self.params.proposer, mesh))

    def prefill(self, params: Params) -> DecodeState:
        sampling = specjax.Sampling.create(ROWS, temperature=[self.temperature, 0] * (ROWS // 2))
        keys = jax.random.split(jax.random.key(3), ROWS)
        return self.decoder.prefill(params, PROMPTS, LENGTHS, limit=LIMITS, sampling=sampling, key=keys)

    def run(self, params: Params) -> tuple[list[list[int]], Any, DecodeState, Any]:
        """The texts, the figures, the state before (donated) as shapes, and the compiled loop."""
        state = self.prefill(params)
        steps = jnp.int32(2**31 - 1)
        compiled = _run.lower(self.decoder, layout(state), params, state, steps).compile()
        before = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        after = compiled(params, state, steps)
        tokens, ends = np.asarray(after.tokens), np.asarray(after.length)
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            assert new.sharding.is_equivalent_to(old.sharding, new.ndim), (old.sharding, new.sharding)
        return [row[:n].tolist() for row, n in zip(tokens, ends, strict=True)], after.stats, before, compiled


def cases() -> dict[str, Case]:
    plain = transformer()
    weights = plain.init(jax.random.key(0))
    drafted = specjax.DraftModel(plain, VOCAB, 2)
    grouped = transformer(kv_heads=2)
    grouped_weights = grouped.init(jax.random.key(0))
    experts = transformer(num_experts=4, experts_per_token=2, expert_size=128)
    windowed = transformer(windows=(6,))
    heads = MedusaHeads(num_heads=2, hidden_size=64, vocab_size=VOCAB)
    rng = np.random.default_rng(5)
    bank = {
        "kernel": jnp.asarray(rng.normal(0, 0.2, (1, 1, 2, 64, 64)), jnp.float32),
        "bias": jnp.zeros((1, 1, 2, 64), jnp.float32),
    }
    medusa = specjax.Medusa(heads, ((0,), (1,), (0, 0)))

    def decoder(target, proposer, rule=None):
        return Decoder(target, proposer, rule or specjax.Match(), (), CAPACITY)

    return {
        "draft, match": Case(decoder(plain, drafted), Params(weights, noisy(weights)), MESHES),
        "whole draft, rejection": Case(
            decoder(plain, drafted, specjax.Rejection()), Params(weights, noisy(weights)), ((2, 4),), False
        ),
        "draft tree, two heads": Case(
            decoder(grouped, specjax.DraftTree(grouped, VOCAB, (2, 1))),
            Params(grouped_weights, noisy(grouped_weights)),
            ((2, 4),),
        ),
        "medusa tree": Case(
            decoder(plain, medusa),
            Params(weights, MedusaParams(bank, jnp.int32(0), {"head": weights["head"]})),
            ((4, 2),),
        ),
        "experts, ngram": Case(
            decoder(experts, specjax.NGram(1)), Params(experts.init(jax.random.key(0))), ((2, 4),), True, 0.0
        ),
        "window, ngram": Case(
            decoder(windowed, specjax.NGram(3)), Params(windowed.init(jax.random.key(0))), ((1, 8),), True, 0.0
        ),
    }


def collectives(text: str) -> list[tuple[str, int]]:
    """Kind and bytes of every operation of compiled HLO that moves data between devices."""
    kinds = "all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter|collective-broadcast|ragged-all-to-all"
    width = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}
    found = []
    for shapes, kind in re.findall(rf"= (.+?) ({kinds})(?:-start)?\(", text):
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):  # several where XLA has combined them
            found.append((kind, width.get(dtype, 4) * math.prod(int(n) for n in dims.split(",") if n)))
    return found


def held(leaf: Any) -> int:
    """Bytes of a leaf on one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def main(only: str = "", report: str = "") -> None:
    assert jax.device_count() == 8
    for name, case in cases().items():
        if only not in name:
            continue
        texts, stats, _, _ = case.run(case.params)
        for sizes in case.meshes:
            mesh = make_mesh(*sizes)
            params = case.on(mesh)
            found, figures, state, compiled = case.run(params)
            assert found == texts, f"{name} on {sizes}: {found} instead of {texts}"
            jax.tree.map(np.testing.assert_array_equal, figures, stats)

            # The greatest thing that travels is smaller than the part of a cache, or the matrix, that lies on a device.
            caches = [held(leaf) for leaf in jax.tree.leaves(state) if leaf.ndim == 4]
            matrices = [leaf.nbytes for leaf in jax.tree.leaves(params.target) if leaf.ndim > 1 and leaf.nbytes > 2**13]
            moved = collectives(compiled.as_text())
            assert moved, "eight devices that never talk: does the test still find what they say?"
            greatest = max(moved, key=lambda item: item[1])
            assert greatest[1] < min(*caches, *matrices), f"{name} on {sizes} moves {greatest}"
            assert compiled.memory_analysis().alias_size_in_bytes >= sum(caches), f"{name} on {sizes}: a second cache"
            if report:
                print(name, sizes, len(moved), *greatest, min(matrices), min(caches), sep=" | ", file=sys.stderr)
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
