"""Memory of reading a prompt, beside the weights, as XLA plans it.

python tests/memory_of_prompt.py [--layers 12 --hidden 768]

The table has a row per prompt length: the cache and hidden states that come out, and the scratch of
the pass, in chunks and at once. With `--window` every other layer sees that many tokens, as in
Gemma 2, and the table compares the cache of a chain of 4 with a cache of the whole text in every
layer.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp

from specjax import LinenModel, Transformer, TransformerConfig
from specjax.caches import prefill


def planned(model: LinenModel, width: int, chunk: int) -> tuple[int, int]:
    """Bytes of the outputs and of the scratch, for one row of `width` tokens."""
    prefill.CHUNK = chunk
    cache = jax.eval_shape(lambda: model.init_cache(1, width))
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens, count = (
        jax.ShapeDtypeStruct((1, width), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    read = jax.jit(lambda *given: prefill.read_prompt(model, *given), donate_argnums=3)
    memory = read.lower(params, tokens, count, cache).compile().memory_analysis()
    return memory.output_size_in_bytes, memory.temp_size_in_bytes


def cached(model: LinenModel, width: int) -> tuple[int, int]:
    """Cache bytes for one row of `width` tokens: if every layer kept all of them, and as it is."""
    made = (
        (lambda: model.init_cache(1, width + 5)),
        (lambda: prefill.empty_cache(model, 1, width, 5)),
    )
    whole, kept = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(make)))
        for make in made
    )
    return whole, kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--window", type=int)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    options = parser.parse_args()
    heads = options.hidden // 64
    config = TransformerConfig(
        vocab_size=32_000,
        hidden_size=options.hidden,
        mlp_size=4 * options.hidden,
        num_layers=options.layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=64,
        max_positions=max(options.lengths),
        windows=tuple(None if i % 2 else options.window for i in range(options.layers))
        if options.window
        else (),
    )
    model = LinenModel(Transformer(config), jnp.float32)
    if options.window:
        print(
            f"one row, float32, {options.layers} layers of {options.hidden}, "
            "every other with a window; MB"
        )
        print("| prompt | all in every layer | kept |\n|---|---|---|")
        for width in options.lengths:
            print(
                "| {} | {:.0f} | {:.0f} |".format(
                    width, *(size / 1e6 for size in cached(model, width))
                )
            )
        return
    chunk = prefill.CHUNK
    print(f"one row, float32, {options.layers} layers of {options.hidden}, chunks of {chunk}; MB")
    print(
        "| prompt | cache and features | scratch in chunks | scratch at once |\n|---|---|---|---|"
    )
    for width in options.lengths:
        out, scratch = planned(model, width, chunk)
        at_once = planned(model, width, width)[1]
        print(
            f"| {width} | {out / 1e6:.0f} | {scratch / 1e6:.0f} | {at_once / 1e6:.0f} |", flush=True
        )


if __name__ == "__main__":
    main()
