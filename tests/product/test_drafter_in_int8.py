"""`load_drafter(dtype="int8")`: the text, what is accepted, and what is refused."""

import jax
import numpy as np
import pytest

import specjax
from specjax.models import Int8

HEAD = specjax.shipped("pycode/eagle3")
PROMPTS = ["import os\n\n\ndef walk(path):\n    ", "class Stack:\n    def __init__(self"]


@pytest.fixture(scope="module")
def target():
    return specjax.load(specjax.shipped("pycode/target"))


@pytest.fixture(scope="module")
def drafters(target):
    shape = {"num_drafts": 3}
    return [
        specjax.load_drafter(HEAD, target, specjax.Chain, dtype=dtype, **shape)
        for dtype in (None, "int8")
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_same(target, drafters, temperature):
    """And about as many drafts are accepted."""
    how = {"max_new_tokens": 64, "temperature": temperature, "seed": 3}
    plain = specjax.generate(target, PROMPTS, proposer="none", **how)
    whole, rounded = (specjax.generate(target, PROMPTS, drafter=d, **how) for d in drafters)
    for made in (whole, rounded):
        np.testing.assert_array_equal(made.tokens, plain.tokens)
    lengths = [made.stats.mean_accepted_length for made in (whole, rounded)]
    assert min(lengths) > 1.5
    assert abs(lengths[0] - lengths[1]) < 0.25 * lengths[0]


def test_a_tree_drafts_in_int8(target):
    tree = specjax.load_drafter(
        HEAD, target, specjax.DynamicTree, dtype="int8", num_nodes=8, depth=3, width=3
    )
    how = {"max_new_tokens": 32, "temperature": 1.0, "seed": 3}
    plain = specjax.generate(target, PROMPTS, proposer="none", **how)
    np.testing.assert_array_equal(
        specjax.generate(target, PROMPTS, drafter=tree, **how).tokens, plain.tokens
    )


def test_every_matrix_is_rounded(drafters):
    whole, rounded = drafters
    assert rounded.name == f"{whole.name} in int8"

    def boxed(leaf):
        return isinstance(leaf, Int8)

    leaves = jax.tree.leaves(rounded.params, is_leaf=boxed)
    assert sum(map(boxed, leaves)) == sum(leaf.ndim == 2 for leaf in jax.tree.leaves(whole.params))
    sizes = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(drafter.params)) for drafter in (whole, rounded)
    ]
    assert sizes[1] < 0.27 * sizes[0]


def test_what_is_refused(target, drafters, tmp_path):
    with pytest.raises(ValueError, match="dtype='int4' is not allowed; pass one of int8"):
        specjax.load_drafter(HEAD, target, dtype="int4")
    medusa = specjax.shipped("pycode/medusa")
    with pytest.raises(ValueError, match="rounds EAGLE-3, P-EAGLE and MTP drafters"):
        specjax.load_drafter(medusa, target, dtype="int8")
    with pytest.raises(ValueError, match="holds weights in int8"):
        specjax.save_drafter(tmp_path / "head", drafters[1], target)


def test_a_drafter_on_a_mesh_is_refused(drafters):
    mesh = jax.make_mesh((1,), ("tensor",))
    target = specjax.load(specjax.shipped("pycode/target"), mesh=mesh)
    with pytest.raises(ValueError, match="is on a mesh: leave dtype= out"):
        specjax.load_drafter(HEAD, target, dtype="int8")
    refused = r"in int8, for one device, and target is on .*without dtype="
    with pytest.raises(ValueError, match=refused):
        specjax.generate(target, PROMPTS, drafter=drafters[1])
