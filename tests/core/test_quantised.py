"""Weights in int8: products are within their bound, and a quantised draft changes no text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from preparing import prepared
from toys import TRANSFORMERS as toys

import specjax
from specjax import Decoder, DraftModel, LanguageModel, Match, Params
from specjax.generation import place
from specjax.models import Packed
from specjax.models.int8 import Int8, int8_dot_general
from specjax.models.quantised import quantise


@functools.cache
def loaded():
    return LanguageModel(toys.model(), toys.weights(), name="toy")


def run(target, proposer, rule, draft, **changes):
    dec = Decoder(target.model, proposer, rule, (toys.EOS,), toys.CAPACITY)
    arrays = Params(target.params, draft)
    return dec.run(arrays, toys.prefill(dec, arrays, **changes))


def chain(draft):
    return DraftModel(draft.model, toys.VOCAB, 2)


def kernel(seed=0, shape=(24, 40)):
    """Columns of very different sizes, one of them zero."""
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=shape) * np.geomspace(1e-3, 1e3, shape[1]) * (np.arange(shape[1]) != 7)
    ).astype(np.float32)


def multiply(x, box):
    return np.asarray(
        int8_dot_general(jnp.asarray(x), box.unbox(), (((x.ndim - 1,), (0,)), ((), ())))
    )


def test_a_kernel_is_rounded_to_half_a_step():
    """Each column is scaled by its largest magnitude, which becomes 127; a zero column has scale
    1."""
    weights = kernel()
    box = Int8.quantise(jnp.asarray(weights))
    assert box.values.dtype == jnp.int8
    assert box.values.shape == (40, 24)
    back = np.asarray(box.values, np.float64).T * np.asarray(box.scale)
    assert (np.abs(back - weights) <= 0.5001 * np.asarray(box.scale)).all()
    assert (np.abs(np.asarray(box.values)).max(1) == np.where(np.arange(40) == 7, 0, 127)).all()
    assert not back[:, 7].any()


def test_products_stay_within_the_bound_of_rounding():
    """|y - x W| <= sum_i |x_i| sw / 2 + |w_i| sx / 2 + sx sw / 4 for each element, and the bound
    is not loose."""
    weights, x = kernel(), np.random.default_rng(1).normal(size=(2, 3, 24)).astype(np.float32)
    box = Int8.quantise(jnp.asarray(weights))
    product, wanted = multiply(x, box), x.astype(np.float64) @ weights
    sx, sw = np.abs(x).max(-1, keepdims=True) / 127, np.asarray(box.scale, np.float64)
    bound = (
        np.abs(x).sum(-1, keepdims=True) * sw / 2
        + np.abs(weights).sum(0) * sx / 2
        + 24 * sx * sw / 4
    )
    assert product.shape == (2, 3, 40)
    assert (np.abs(product - wanted) <= bound * 1.001 + 1e-30).all()
    assert np.abs(product - wanted).max() > 0
    assert np.abs(product - wanted).max() < 0.02 * np.abs(wanted).max()


def test_a_row_does_not_depend_on_the_others():
    """Alone (padded to two rows) or among five, a row has the same bits; a row of zeros gives
    zeros."""
    box = Int8.quantise(jnp.asarray(kernel()))
    x = np.random.default_rng(2).normal(size=(5, 24)).astype(np.float32)
    x[3] = 0
    together = multiply(x, box)
    for row in range(5):
        assert multiply(x[row : row + 1], box).tobytes() == together[row].tobytes()
    assert not together[3].any()


def test_other_products_are_as_ever():
    """Two float arrays are multiplied as usual; another contraction with an int8 kernel is
    refused."""
    x = jnp.ones((2, 24))
    dims = (((1,), (0,)), ((), ()))
    np.testing.assert_array_equal(int8_dot_general(x, jnp.ones((24, 3)), dims), np.full((2, 3), 24))
    with pytest.raises(ValueError, match="contracts x's last axis"):
        int8_dot_general(x, Int8.quantise(jnp.ones((24, 2))).unbox(), (((0,), (1,)), ((), ())))


def test_logits_of_a_quantised_model():
    """They differ by a few percent of the largest; every matrix is int8, and the rest is
    unchanged."""
    made = quantise(loaded())
    wanted = toys.plain_logits(toys.PROMPTS)
    logits = toys.plain_logits(toys.PROMPTS, made.model, made.params)
    assert 1e-4 < np.abs(logits - wanted).max() / np.abs(wanted).max() < 0.06
    kinds = jax.tree.map(
        lambda leaf: type(leaf), made.params, is_leaf=lambda leaf: isinstance(leaf, Int8)
    )
    assert set(jax.tree.leaves(kinds["layer_0"]["mlp"])) == {Int8}
    assert kinds["head"]["kernel"] is Int8
    assert made.params["embedding"] is loaded().params["embedding"]
    assert quantise(loaded()) is made
    assert quantise(made) is made
    assert made.name == "toy in int8"


def test_a_quantised_draft_changes_no_text():
    """The target in int8 drafts for itself: greedy and sampled texts are those of plain
    decoding."""
    rule, draft = Match(), quantise(loaded())
    greedy = run(loaded(), chain(draft), rule, draft.params)
    assert toys.texts(greedy) == toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS)
    # Drafts are accepted mostly, but not always.
    sampled = run(loaded(), chain(draft), rule, draft.params, temperature=1.0)
    for stats in (greedy.stats, sampled.stats):
        assert 0.5 < stats.accepted.sum() / stats.tested.sum()
    assert sampled.stats.accepted.sum() < sampled.stats.tested.sum()
    assert toys.texts(sampled) == toys.decoded("none", "match", 1.0)[0]


@pytest.mark.parametrize("kind", [Int8, Packed], ids=["int8", "int4"])
@pytest.mark.parametrize("own", [True, False])
def test_generate_quantises(kind, own):
    """The draft of `self-int8`, or one that is asked for in int8, is the quantised model; and so
    with int4."""
    dtype = "int8" if kind is Int8 else "int4"
    how = {"proposer": f"self-{dtype}"} if own else {"draft": True, "draft_dtype": dtype}
    target = loaded()
    how = {**how, "draft": target} if "draft" in how else how
    call = prepared(target, [[1, 2, 3], [9]], num_drafts=3, max_new_tokens=24, **how)
    assert call.decoder.proposer.max_depth == 3
    made = jax.tree.leaves(place(call).params.proposer, is_leaf=lambda leaf: isinstance(leaf, kind))
    assert any(isinstance(leaf, kind) for leaf in made)
    kept = jax.tree.leaves(place(call).params.target, is_leaf=lambda leaf: isinstance(leaf, kind))
    assert not any(isinstance(leaf, kind) for leaf in kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_dtype": "int4"}, "draft_dtype='int4'"),
        ({"draft_dtype": "int8"}, "draft_dtype='int8' with draft=None"),
        ({"proposer": "medusa"}, "proposer='medusa' comes without"),
        ({"proposer": "self-int8", "draft": "itself"}, "proposer=.self-int8. uses no draft model"),
        ({"draft_dtype": "int2", "draft": "itself"}, "int2.*, or .int4."),
    ],
)
def test_generate_refuses(change, message):
    """The error names the option before anything is compiled."""
    target = loaded()
    change = {name: target if value == "itself" else value for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        specjax.generate(target, [[1]], **change)


def test_a_model_of_ones_own_is_not_quantised():
    """Only models that multiply through `dot_general` can be quantised."""
    mine = LanguageModel(
        specjax.models.from_function(lambda p, t: p[t], vocab_size=9, max_positions=9), jnp.eye(9)
    )
    with pytest.raises(ValueError, match="model is a RereadingModel; only a specjax Transformer"):
        quantise(mine)
