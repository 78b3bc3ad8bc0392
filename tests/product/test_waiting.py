"""Committed tokens wait for a drafter that `Adaptive` leaves out of steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import TABLES as toys

from specjax import RULES, Decoder, Params
from specjax.proposers import Adaptive, ChoiceTree
from specjax.proposers import waiting as module
from specjax.proposers.waiting import Waiting
from specjax.types import ABSENT, Block

pytestmark = pytest.mark.xdist_group("waiting")  # a share takes all of them, or none

FEW = 3


def drafter(name):
    """A case that tests share, or a chain of P-EAGLE, which they share as a tree."""
    if name != "peagle":
        return toys.CASES[name]
    source, params = toys._peagle()
    return ChoiceTree(source, ((0,), (0, 0), (0, 0, 0))), params


@pytest.mark.parametrize(
    "name", ["eagle3", "mtp layers", "medusa chain", "peagle", "block draft best first"],
)  # fmt: skip
def test_a_drafter_that_was_left_out_drafts_as_if_it_had_not_been(name, monkeypatch):
    """It reads what waited in one pass, sooner where the buffer is full, and has the drafts of one
    that read the same text as a prompt."""
    monkeypatch.setattr(module, "TOKENS", FEW)
    inner, own = drafter(name)
    adaptive = Adaptive(None, inner, tuple(sorted({1, 2, inner.num_nodes})))
    assert adaptive._waits and inner.waits and not inner.resumes
    last = adaptive.options.index(("drafter", inner.num_nodes - 1))
    dec = Decoder(toys.model(), adaptive, RULES["match"](), (toys.EOS,), toys.CAPACITY)
    whole = dataclasses.replace(dec, proposer=inner)

    def params(option):
        seconds = jnp.ones(len(adaptive.options), jnp.float32)
        made = toys.adaptive((1.0,), own)
        return Params(toys.weights(), made.replace(seconds=seconds, forced=jnp.int32(option)))

    alone = Params(toys.weights(), own)
    propose, wanted_of = jax.jit(dec.propose), jax.jit(whole.propose)
    finish, plain = jax.jit(dec.commit), toys.decoded("none", "match")[0]
    verify, state, compared, flushed = jax.jit(dec.verify), toys.prefill(dec, params(0)), 0, False
    for pause in (1, FEW + 6, 2):
        for _ in range(pause):
            before = np.array(state.proposer.waiting.count)
            state = dec.run(params(0), state, 1)
            flushed |= bool((np.asarray(state.proposer.waiting.count) < before).any())
        live = ~np.asarray(state.done)
        text, length = np.asarray(state.tokens)[:, : toys.CAPACITY], np.asarray(state.length)
        fresh = toys.prefill(
            whole, alone, prompt=text, prompt_length=length,
            limit=np.maximum(toys.LIMITS, length),
        )  # fmt: skip
        wanted, _ = wanted_of(alone, fresh)
        made, after = propose(params(last), state)
        for row in np.flatnonzero(live):
            present = np.asarray(wanted.parent[row] != ABSENT)
            np.testing.assert_array_equal(made.parent[row] != ABSENT, present)
            np.testing.assert_array_equal(made.tokens[row][present], wanted.tokens[row][present])
            compared += int(present.sum()) - 1
        assert not after.proposer.waiting.count.any()
        state = finish(params(last), after, made, verify(params(last), after, made))[0]
    assert compared > 5 and flushed
    assert toys.texts(dec.run(params(last), state)) == plain


def test_a_drafter_that_waits_and_cannot_catch_up_is_refused():
    """The error names the class and what to change."""

    class Stuck(type(toys.CASES["eagle3"][0])):
        def catch_up(self, params, state):
            return None

    inner, own = toys.CASES["eagle3"]
    stuck = Stuck(inner.source, inner.num_drafts)
    dec = Decoder(toys.model(), Adaptive(None, stuck, (1, 4)), RULES["match"](), (), toys.CAPACITY)
    params = Params(toys.weights(), toys.adaptive((1.0, 1.0), own))
    state = toys.prefill(dec, params)
    with pytest.raises(TypeError, match="Stuck has waits=True, and its catch_up returns None"):
        jax.eval_shape(dec.propose, params, state)


def test_tokens_wait_in_the_order_of_the_text():
    """Rows have different numbers of them; what is not committed is overwritten."""
    tokens = np.arange(8, dtype=np.int32).reshape(2, 4)
    block = Block(tokens, tokens[..., None].astype(np.float32), np.array([2, 1], np.int32))
    waits = Waiting.empty(block, 4)
    for _ in range(3):
        waits = waits.after(block, jnp.bool_(True))
    assert waits.count.tolist() == [6, 3]
    assert waits.tokens[0, :6].tolist() == [0, 1, 0, 1, 0, 1]
    assert waits.tokens[1, :3].tolist() == [4, 4, 4] == waits.hidden[1, :3, 0].tolist()
    assert waits.after(block, jnp.bool_(False)).count.tolist() == [6, 3]
    size = waits.tokens.shape[1]
    assert not waits.is_full(size - 6) and waits.is_full(size - 5)
    assert waits.emptied(jnp.bool_(True)).count.tolist() == [0, 0]
