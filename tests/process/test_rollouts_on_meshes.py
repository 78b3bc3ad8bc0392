"""Samples on 2 x 2 devices, in a process of its own: rows with expected tokens ahead take turns
apart, rows end and make room, and the texts are those of plain decoding on one device."""

import subprocess
import sys

from several_devices import environment

_FOUR = r"""
import itertools
import jax
import specjax
from specjax.parallel import make_mesh
from specjax.rollouts import Sampler, rollout_keys
from specjax.rollouts.depths import Depths, Turn

assert jax.device_count() == 4
folder, seen = specjax.shipped("tiny/target"), []
prompts = [[5, 9, 4], [7, 3], [30]]
keys = rollout_keys(0, prompts, samples=2)
settings = {"slots": 4, "max_new_tokens": 12, "num_drafts": 5}
wanted = Sampler(specjax.load(folder), **settings).sample(prompts, keys, samples=2)
turns = itertools.count()


def best(depths, size, rows, *, apart, tries):
    # Two rows apart with drafts, and all rows without, in turn.
    ahead = [n for n, row in enumerate(rows) if row.left][:2]
    if apart and len(ahead) == 2 < len(rows) and next(turns) % 2 == 0:
        seen.append(depths.padded(2))
        return Turn(5, 2, ahead)
    return Turn(0, 2, range(len(rows)))


Depths.best = best
target = specjax.load(folder, mesh=make_mesh(data=2, model=2))
expected = [text if n % 3 else None for n, text in enumerate(wanted.texts)]
made = Sampler(target, **settings).sample(prompts, keys, samples=2, expected=expected)
assert made.texts == wanted.texts, (made.texts, wanted.texts)
assert made.passes < wanted.passes and set(seen) == {2}, (made.passes, seen)
assert jax.numpy.abs(made.logprobs - wanted.logprobs).max() < 1e-4
try:
    Sampler(target, slots=3)
except ValueError as error:
    assert "pass slots=4" in str(error)
else:
    raise AssertionError("no error")
print("all good")
"""


def test_texts_on_four_devices():
    done = subprocess.run(
        [sys.executable, "-c", _FOUR], capture_output=True, text=True, env=environment(4)
    )
    assert done.returncode == 0 and "all good" in done.stdout, done.stdout + done.stderr[-3000:]
