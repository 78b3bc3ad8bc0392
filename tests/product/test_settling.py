"""An `Adaptive` proposer keeps drafts that were chosen again and again, on a CPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adaptive_cases import DRAFT, WIDTHS, arrays
from jax.experimental import io_callback
from table_model import TableModel
from toys import TABLES as toys

from specjax import RULES, Decoder, NGram
from specjax.proposers import MEASURED, Adaptive
from specjax.proposers.adaptive.settling import Settling

pytestmark = pytest.mark.xdist_group("settling")  # a share takes all of them, or none

FULL = len(Adaptive(NGram(3, min_ngram=1), DRAFT[0], WIDTHS).options) - 1
INF = 1e6


@dataclasses.dataclass(frozen=True)
class OnOneCpu(TableModel):
    one_cpu = True


@dataclasses.dataclass(frozen=True)
class NotedLookup(NGram):
    """Notes the steps in which it is asked: those with a choice."""

    asked: list = dataclasses.field(default_factory=list, compare=False)

    def propose(self, params, state, context):
        io_callback(lambda: self.asked.append(1), None, ordered=True)
        return super().propose(params, state, context)


LOOKUP = NotedLookup(3, min_ngram=1)


def decoder(rule="match", settles=True, **changes):
    model = toys.model()
    if settles:
        model = OnOneCpu(model.vocab_size, model.memory)
    proposer = Adaptive(LOOKUP, DRAFT[0], WIDTHS, **changes)
    return Decoder(model, proposer, RULES[rule](), (toys.EOS,), toys.CAPACITY)


def run(dec, params, most=2**31 - 1, state=None):
    """The state after so many steps, and how many of them had a choice."""
    state = toys.prefill(dec, params) if state is None else state
    jax.effects_barrier()
    LOOKUP.asked.clear()
    state = jax.block_until_ready(dec.run(params, state, most))
    jax.effects_barrier()
    return state, len(LOOKUP.asked)


def passes(state):
    return int(np.asarray(state.stats.target_passes).max())


def test_spells_get_longer_while_the_same_drafts_are_chosen():
    """Another choice ends that, and drafts that do not pay end a spell."""
    yes, no = jnp.ones(1, bool), jnp.zeros(1, bool)
    settling, spells = Settling.start(1), []
    for same in (yes, yes, yes, yes, yes, no, yes, yes):
        settling = settling.chosen(same).after(yes)
        spells.append(int(settling.steps[0]))
        for _ in range(spells[-1]):
            settling = settling.after(yes)
        assert int(settling.steps[0]) == 0
    assert spells == [0, 4, 16, 32, 32, 0, 0, 4]
    assert int(settling.chosen(yes).after(no).steps[0]) == 0


@pytest.mark.parametrize("forced", [MEASURED, FULL])
def test_the_text_does_not_depend_on_spells(forced):
    """A forced option has one choice, so that its seconds are those of a spell."""
    params, plain = arrays((1, INF, INF, INF, 1), forced), toys.decoded("none", "match")[0]
    state, chosen = run(decoder(), params)
    assert toys.texts(state) == plain
    assert chosen == 1 if forced == FULL else 1 < chosen < passes(state)
    every, always = run(decoder(settles=False), params)
    assert toys.texts(every) == plain and always == passes(every)
    if forced == FULL:
        jax.tree.map(np.testing.assert_array_equal, every.stats, state.stats)


def test_a_run_may_end_within_a_spell():
    """Each run takes as many steps as it may."""
    dec, params = decoder(), arrays((1, INF, INF, INF, 1))
    state, taken = toys.prefill(dec, params), 0
    while not np.asarray(state.done).all():
        state, _ = run(dec, params, 3, state)
        assert passes(state) - taken == 3 or np.asarray(state.done).all()
        taken = passes(state)
    assert toys.texts(state) == toys.decoded("none", "match")[0]


def test_a_spell_ends_where_its_drafts_do_not_pay():
    """What a step costs is known from the choice: here it became far more than drafts promise."""
    dec, params = decoder(), arrays((1, INF, INF, INF, 1))
    state, _ = run(dec, params, 3)
    alive = ~np.asarray(state.done)
    assert alive.any()
    settled = dec.settled(state)
    step = jax.jit(lambda params, state: settled.step(params, state)[0])
    kept = step(params, state).proposer.settling.steps
    dear = dataclasses.replace(state.proposer, needed=jnp.full_like(state.proposer.needed, 99.0))
    ended = step(params, dataclasses.replace(state, proposer=dear)).proposer.settling.steps
    assert (np.asarray(kept)[alive] > 0).any() and not np.asarray(ended).any()


def test_what_never_settles():
    """A rule whose text depends on the drafts, first calls, trees, and several devices."""
    params = arrays((1, INF, INF, INF, 1))
    state = toys.prefill(decoder(), params)
    assert decoder().settled(state).proposer.narrower == ()
    assert decoder("rejection").settled(state) is None
    assert decoder(brief=True).settled(state) is None
    assert decoder(settles=False).settled(state) is None
    tree = toys.CASES["best first"][0]
    assert not Adaptive(None, tree, tuple(sorted({1, 2, tree.num_nodes}))).settles
    assert not Adaptive(LOOKUP, None, (1, 2, 4)).settles
