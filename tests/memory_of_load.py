"""Time and peak memory of `specjax.load` on a random Llama.

python tests/memory_of_load.py --megabytes 1000

One process writes the model in bfloat16 and another reads it. Memory is the growth of the maximum
resident set size, measured after a tiny model was loaded, so that JAX itself does not count.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

import specjax

TINY = 0.1


def write(folder: str, megabytes: float) -> None:
    """Write a folder of this size; the embedding and the head are a sixth of it."""
    size = max(int((megabytes * 2**20 / 2 / 60) ** 0.5) // 64 * 64, 64)
    config = specjax.TransformerConfig(
        5 * size, size, 5 * size // 2, 4, size // 64, size // 64, 64, 128
    )
    model = specjax.LinenModel(specjax.Transformer(config))
    numbers = np.random.default_rng(0).standard_normal(2**20).astype(jnp.bfloat16)

    def fill(shape):
        return np.resize(numbers, shape.shape)

    params = jax.tree.map(fill, jax.eval_shape(model.init, jax.random.key(0)))
    specjax.save(specjax.LanguageModel(model, params), folder)


def read(warm: str, folder: str, dtype: str) -> dict[str, float]:
    specjax.load(warm, dtype)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    loaded = specjax.load(folder, dtype)
    seconds = time.perf_counter() - started
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (
        1 if sys.platform == "darwin" else 1024
    )
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
    return {"weights": weights, "memory": taken, "ratio": taken / weights, "seconds": seconds}


def measure(megabytes: float, dtypes: list[str]) -> dict[str, dict[str, float]]:
    """{dtype: time and memory of loading}."""

    def alone(*arguments):
        command = [sys.executable, __file__, *map(str, arguments)]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    with tempfile.TemporaryDirectory() as warm, tempfile.TemporaryDirectory() as folder:
        alone("write", warm, TINY)
        alone("write", folder, megabytes)
        return {dtype: json.loads(alone("read", warm, folder, dtype)) for dtype in dtypes}


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write(sys.argv[2], float(sys.argv[3]))
    elif sys.argv[1:2] == ["read"]:
        print(json.dumps(read(*sys.argv[2:])))
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--megabytes", type=float, default=1000, help="of the file")
        parser.add_argument(
            "--dtypes", nargs="+", default=["bfloat16", "float32"], help="to load it in"
        )
        options = parser.parse_args()
        for dtype, cost in measure(options.megabytes, options.dtypes).items():
            print(
                f"{dtype:<9} weights {cost['weights'] / 1e9:.2f} GB, "
                f"peak memory {cost['memory'] / 1e9:.2f} GB "
                f"({cost['ratio']:.2f} x), {cost['seconds']:.1f} s"
            )
