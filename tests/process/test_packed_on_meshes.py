"""Packed weights on meshes: what each device holds, the same texts, and what is refused.

Several devices need a process of their own.
"""

import subprocess
import sys

import folders
import gguf_files
import packed_folders
from gguf import GGMLQuantizationType as Kind
from several_devices import ROOT, environment

_FOUR = r"""
import sys
import jax, numpy as np
import specjax
from specjax.models import Packed
from specjax.parallel import Indivisible, make_mesh

int4, int8, fp8, ordered, k_quants, blocks, plain_numbers = sys.argv[1:]
assert jax.device_count() == 4


def held(leaf):
    return leaf.addressable_shards[0].data.shape


two = make_mesh(data=2, model=2)
prompts = [[5, 9, 30, 41, 5, 9], [7, 7, 8, 100]]
how = {"max_new_tokens": 10, "temperature": 1.0, "seed": 3}
for folder in (int4, int8, fp8, k_quants, blocks):
    plain, split = specjax.load(folder), specjax.load(folder, mesh=two)
    wanted = specjax.generate(plain, prompts, proposer="none", **how).tokens
    for proposer in ("none", "ngram"):
        made = specjax.generate(split, prompts, proposer=proposer, **how).tokens
        assert made == wanted, (folder, proposer)
    whole = specjax.load(folder, mesh=two, rules={})
    assert specjax.generate(whole, prompts, proposer="ngram", **how).tokens == wanted
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)),
        plain.params,
        split.params,
    )

# Hidden size 64, MLP size 96, groups of 16 inputs; pairs of 4 bits are a byte.
layer = specjax.load(int4, mesh=two).params["layer_0"]
up, down = layer["mlp"]["up"]["kernel"], layer["mlp"]["down"]["kernel"]
assert isinstance(up, Packed) and isinstance(down, Packed)
assert held(up.codes) == (48, 32) and held(up.scales) == (48, 4)
assert held(down.codes) == (64, 24) and held(down.scales) == (64, 3)
down = specjax.load(int8, mesh=two).params["layer_0"]["mlp"]["down"]["kernel"]
assert held(down.codes) == (64, 48) and held(down.scales) == (64, 1)

# A target in plain numbers drafts with its own copy in 4 bits, which is split as the target is.
target = specjax.load(plain_numbers, mesh=two)
wanted = specjax.generate(target, prompts, proposer="none", **how).tokens
out = specjax.generate(target, prompts, proposer="self-int4", num_drafts=3, **how)
assert out.tokens == wanted and out.stats.accepted > 0
down = specjax.rounding.in_int4(target).params["layer_0"]["mlp"]["down"]["kernel"]
assert isinstance(down, Packed) and held(down.codes) == (256, 128), held(down.codes)
out = specjax.generate(target, prompts, proposer="self-int8", num_drafts=3, **how)
assert out.tokens == wanted

# Groups of 128 inputs would be cut: 256 / 4 = 64 of the attention's output.
target = specjax.load(plain_numbers, mesh=make_mesh(data=1))
try:
    specjax.generate(target, prompts, proposer="self-int4", **how)
except Indivisible as error:
    assert "o_proj.weight" in str(error) and "64 inputs" in str(error), error
    assert 'proposer="self-int8"' in str(error), error
else:
    raise AssertionError("no error")

# Four devices would cut the groups of `down`: 96 / 4 = 24 inputs.
for folder, mesh, name in ((int4, make_mesh(data=1), "1.5 groups"), (ordered, two, "act-order")):
    try:
        specjax.load(folder, mesh=mesh)
    except Indivisible as error:
        assert "down_proj.weight" in str(error) and name in str(error), error
        assert "dequantise=True" in str(error)
    else:
        raise AssertionError("no error")
    specjax.load(folder, mesh=mesh, dequantise=True)
print("all good")
"""


def test_packed_weights_on_four_devices():
    """Codes and scales are split as the dense matrix is, and a group stays on one device.

    Of GGUF files, too, and of a target's own copy in 4 bits, with which it drafts.
    """
    formats = ("int4", "int8", "fp8", "act-order")
    made = [str(packed_folders.write(format, f"packed-mesh-{format}")) for format in formats]
    for kind in (Kind.Q4_K, Kind.Q4_0, Kind.F32):
        path = folders.ROOT / f"mesh-{kind.name}.gguf"
        gguf_files.write(path, "llama", kind)
        made.append(str(path))
    done = subprocess.run(
        [sys.executable, "-c", _FOUR, *made],
        env=environment(4),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all good" in done.stdout
