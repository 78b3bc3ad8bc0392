"""Targets with layers with a state, and with chunks, on meshes: the same texts, states split.

Several devices need a process of their own.
"""

import subprocess
import sys

import pytest
import small_families
from several_devices import environment

CASES = {
    "kimi_linear, groups, biases": "layer_1/mixer/q/kernel",
    "nemotron_h, no biases": "layer_0/mixer/x/kernel",
    "lfm2, conv, attention": "layer_0/mixer/x/kernel",
    "llama4_text, one expert": "layer_0/attention/q/kernel",
}
"""Case of `small_families` -> a parameter whose outputs are split."""

_FOUR = r"""
import sys
import jax, numpy as np
from flax.traverse_util import flatten_dict
import specjax
from specjax.parallel import make_mesh

folder, split = sys.argv[1:]
assert jax.device_count() == 4
rng = np.random.default_rng(0)
prompts = [rng.integers(1, 40, size).tolist() for size in (14, 3)]
how = {"max_new_tokens": 10, "temperature": 1.0, "seed": 3, "eos": []}
plain = specjax.load(folder)
wanted = specjax.generate(plain, prompts, proposer="none", **how).tokens
mesh = make_mesh(data=2, model=2)
target = specjax.load(folder, mesh=mesh)
for name in ("draft", "tree"):
    out = specjax.generate(target, prompts, proposer=name, draft=target, **how)
    assert out.tokens == wanted, name
    assert out.stats.accepted > 0
params = {"/".join(path): leaf for path, leaf in flatten_dict(target.params).items()}
assert split in params, sorted(params)
leaf = params[split]
assert leaf.addressable_shards[0].data.shape[1] * 2 == leaf.shape[1], leaf.sharding
print("checked")
"""


@pytest.mark.parametrize("case", CASES)
def test_texts_on_four_devices(case):
    """Sampled ones, which a wrong state would change at once."""
    done = subprocess.run(
        [sys.executable, "-c", _FOUR, str(small_families.folder(case)), CASES[case]],
        env=environment(4), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("checked\n")
