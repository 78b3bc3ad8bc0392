"""A sampler whose rows are split over four devices draws the texts of one device, in a process of
its own."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]

_FOUR = r"""
import jax
import specjax
from specjax.rollouts import Sampler, rollout_keys
from specjax.rollouts.depths import Depths, Turn

assert jax.device_count() == 4
PROMPTS, SAMPLES, NEW = [[5, 9, 7], [11, 3, 8, 2], [30], [5, 9, 7], [4, 4]], 2, 9
folder = specjax.shipped("tiny/draft")
one, split = specjax.load(folder), specjax.load(folder, mesh=specjax.make_mesh(data=4))
try:
    Sampler(split, slots=6)
except ValueError as error:
    assert "slots=6 do not divide among the 4 devices" in str(error), error
    assert "pass slots=8" in str(error), error
else:
    raise AssertionError("no ValueError")
keys = rollout_keys(0, PROMPTS, SAMPLES)
wanted = Sampler(one, slots=4, max_new_tokens=NEW).sample(PROMPTS, keys, samples=SAMPLES)
sampler = Sampler(split, slots=8, max_new_tokens=NEW, num_drafts=2)
plain = sampler.sample(PROMPTS, keys, samples=SAMPLES)
assert plain.texts == wanted.texts and plain.passes == sum(map(len, wanted.texts))


# Some rows take turns with drafts apart from the others, and weights come from one device.
def best(self, size, rows, **_):
    return Turn(2, 2, [n for n in range(len(rows)) if n % 2 == 0])


Depths.best = best
made = sampler.sample(PROMPTS, keys, samples=SAMPLES, params=one.params, expected=wanted.texts)
assert made.texts == wanted.texts and made.passes < plain.passes
print("equal")
"""


def test_rows_on_four_devices():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", _FOUR], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, **flags, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.endswith("equal\n"), done.stderr[-3000:]
