"""The laws of decoding with draft models that are perfect or differ from the target in vocabulary.

`tests/product` has the perfect ones under the other rules.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees
from draft_laws import DraftLaws, naive
from over import pytest_generate_tests  # noqa: F401 - pytest calls it
from toys import TABLES as toys

from specjax import RULES, Decoder, DraftModel, Params


class TestDraftLaws(DraftLaws):
    """A rule with shared noise, one for chains, and one with numbers."""

    PAIRS: ClassVar = [("draft 3", rule) for rule in ("match", "block", "typical")]


@pytest.mark.parametrize(
    ("rule", "size"), [("rejection", toys.VOCAB - 5), ("match", toys.VOCAB + 6)]
)
def test_a_draft_may_have_another_padded_vocabulary(rule, size):
    """Neither a smaller nor a larger draft vocabulary changes the text."""
    proposer = DraftModel(toys.model(size, num_layers=1), toys.VOCAB, 2)
    dec = Decoder(toys.model(), proposer, RULES[rule](), (toys.EOS,), toys.CAPACITY)
    arrays = Params(toys.weights(), toys.revocabulated(size))
    state = dec.run(arrays, toys.prefill(dec, arrays))
    assert toys.texts(state) == naive()
    assert 0 < state.stats.accepted.sum() < state.stats.tested.sum()
    assert max(map(max, naive())) >= toys.VOCAB - 5
    state = dec.run(arrays, toys.prefill(dec, arrays, temperature=1.0))
    assert max(map(max, toys.texts(state))) < toys.VOCAB
    if RULES[rule].shared_noise:
        assert toys.texts(state) == toys.decoded("none", rule, 1.0)[0]


def test_a_step_tells_what_it_did():
    """StepInfo describes the emission; on a tree, paths leave the first branch and the state
    follows them."""
    rule = "rejection"
    dec, arrays = toys.decoder("tree", rule), toys.params("tree")
    step = jax.jit(dec.step)
    state = toys.prefill(dec, arrays, temperature=1.0)
    sideways = 0
    while not state.done.all():
        before = state
        state, info = step(arrays, state)
        np.testing.assert_array_equal(info.count, state.length - before.length)
        np.testing.assert_array_equal(
            info.proposal.tokens[:, 0], before.tokens[jnp.arange(4), before.length - 1]
        )
        for row in range(toys.ROWS):
            start, count = int(before.length[row]), int(info.count[row])
            np.testing.assert_array_equal(
                state.tokens[row, start : start + count], info.tokens[row, :count]
            )
            accepted, path = int(info.num_accepted[row]), np.asarray(info.path[row])
            way = trees.ancestors(np.asarray(info.proposal.parent[row]), int(path[accepted]))
            assert path[: accepted + 1].tolist() == way
            sideways += way != list(range(accepted + 1))
    assert toys.texts(state) == toys.decoded("tree", rule, 1.0)[0]
    assert sideways > 5
