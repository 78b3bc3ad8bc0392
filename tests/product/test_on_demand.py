"""The first calls of the default compile few options, and all of them once those would pay."""

from __future__ import annotations

import dataclasses
import sys

import counted
import jax
import jax.numpy as jnp
import language_models
import numpy as np
import pytest
from preparing import prepared

import specjax
from specjax import NGram
from specjax._internal import kept_programs
from specjax.drafters import automatic, on_demand
from specjax.generation.warmup import warm_up
from specjax.tuning import Demand, add_demand, keep_demand, read_demand

pytestmark = pytest.mark.xdist_group("on demand")  # a share takes all of them, or none

PROMPT, HOW = "the cat the cat", {"max_new_tokens": 24, "temperature": 0.9, "seed": 3}
SMALL = (("plain", 0), ("lookup", 4))
WHOLE = (("plain", 0), ("lookup", 2), ("lookup", 4), ("lookup", 8))


@pytest.fixture(autouse=True)
def _as_in_a_new_process(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    sys.modules["specjax.generation.warmup"]._compiled.clear()


def test_all_options_are_compiled_when_they_would_have_paid():
    """Every text is that of plain decoding, and each of the two programs is compiled once."""
    target = language_models.target()
    plain = specjax.generate(target, PROMPT, proposer="none", **HOW)
    first = specjax.generate(target, PROMPT, **HOW)
    assert first.choices.options == SMALL and first.stats.compile_seconds > 0
    few = warm_up(prepared(target, PROMPT, **HOW)).learned
    assert few.demand.depths == (2, 4, 8) and not few.demand.pays
    before = counted.compilations()
    again = specjax.generate(target, PROMPT, **HOW)
    assert again.choices.options == SMALL and counted.compilations() == before
    few.demand.lost = few.demand.compiling
    few.prior[:], few.judged[:] = 0.25, 50.0
    whole = specjax.generate(target, PROMPT, **HOW)
    assert whole.choices.options == WHOLE and whole.stats.compile_seconds > 0
    learned = warm_up(prepared(target, PROMPT, **HOW)).learned
    # What the first calls have learned goes on.
    assert learned.demand is None and learned.judged[0] >= 50 and learned.prior[1] == 0.25
    before = counted.compilations()
    last = specjax.generate(target, PROMPT, **HOW)
    assert last.choices.options == WHOLE and counted.compilations() == before
    assert first.tokens == again.tokens == whole.tokens == last.tokens == plain.tokens


def test_a_session_has_all_options_at_once():
    """The states of its turns have one form."""
    target = language_models.target()
    session = specjax.Session(target, capacity=96, **HOW)
    for prompt in (PROMPT, f"{PROMPT} sat on"):
        out = session.generate(prompt)
        assert out.choices.options == WHOLE
        assert out.tokens == specjax.generate(target, prompt, proposer="none", **HOW).tokens


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_one_judgement_serves_all_widths(temperature):
    """It gives the text of plain decoding, of rows that differ in length, filters and penalties."""
    target = language_models.target()
    drafter = automatic(target, language_models.draft()).begun(2)
    assert drafter.proposer.widths == (1, 3) and drafter.proposer.brief
    drafter = dataclasses.replace(drafter, seconds=((1.0, 1.1, 1.2),))
    how = {
        "max_new_tokens": 24, "temperature": temperature, "top_k": 9, "top_p": 0.9, "seed": [1, 2],
        "presence_penalty": 0.5,
    }  # fmt: skip
    prompts = [PROMPT, "a dog"]
    made = specjax.generate(target, prompts, drafter=drafter, **how)
    assert made.stats.accepted > 0
    assert made.tokens == specjax.generate(target, prompts, proposer="none", **how).tokens


def test_what_begins_with_all_options():
    """One number of drafts, trees, other lookups, and whatever prepares everything."""
    target, draft = language_models.target(), language_models.draft()
    chain = specjax.make_drafter(target, draft, num_drafts=8)
    tree = specjax.make_drafter(target, draft, specjax.DynamicTree, depth=2, width=2, num_nodes=5)
    for made in (
        specjax.adaptive(chain),  # a drafter of the user's
        on_demand(automatic(target), False),  # `specjax bench` and `tune`
        automatic(target, num_drafts=2),
        automatic(target, expects=True),
        on_demand(specjax.adaptive(tree)),
    ):
        assert made.begun(1) is None
    begun = automatic(target, draft).begun(1)
    assert begun.proposer.options == (*SMALL, ("drafter", 4))
    assert on_demand(specjax.adaptive(chain, NGram(8))).begun(4).proposer.widths == (1, 3)
    assert on_demand(chain) is chain


def lost(rate: float, four: float, of: float = 100.0, drafting: float = 0.8) -> float:
    """The share of a call that was lost, by a lookup whose four drafts cost so many plain steps."""
    demand = Demand((2, 4, 8), compiling=5.0)
    judged = {0: (of, rate * of)}
    options, prior = (("plain", 0), ("lookup", 4)), np.array([0.5, 0.4])
    demand.count(options, np.array([1.0, four]), judged, prior, drafting, spent=1.0)
    return demand.lost


def test_the_loss_follows_from_rates_and_costs():
    """With nearly all drafts right eight are best; with few right, two where they are cheap."""
    rate = (90 + 8 * 0.5) / 108
    four, eight = (sum(rate**k for k in range(n + 1)) / (1 + 0.1 * n) for n in (4, 8))
    assert lost(0.9, 1.4) == pytest.approx(0.8 * (1 - four / eight))
    assert lost(0.7, 1.4) == 0  # four drafts are best
    assert lost(0.9, 9.0, of=0.0, drafting=0.0) == 0  # nothing is known
    two = (1 + 0.4 + 0.4**2) / 1.2
    assert lost(0.39, 1.7, drafting=0.0) == pytest.approx(0.5 * (1 - 1 / two), abs=0.1)
    assert lost(0.1, 1.4, drafting=0.0) == 0  # no number of drafts pays
    # Where drafts seem to take less time than none, more of them do not take less still.
    for faster in (0.9, 0.5):
        four, eight = (sum(rate**k for k in range(n + 1)) for n in (4, 8))
        assert lost(0.9, faster) == pytest.approx(0.8 * max(1 - four / faster / eight, 0))


def test_calls_that_cannot_rest_lose_the_time_of_choosing():
    """As far as drafts save less; a step that takes long has little to lose."""
    demand = Demand((2, 4, 8), compiling=5.0)
    demand.count_rests(plain=6e-4, saved=0.0, spent=10.0)
    assert demand.lost == pytest.approx(1.0)
    for plain, saved, lost in ((6e-4, 0.07, 0.3), (6e-4, 0.2, 0.0), (6e-4, -1.0, 1.0)):
        demand.lost = 0.0
        demand.count_rests(plain, saved, spent=10.0)
        assert demand.lost == pytest.approx(lost, abs=1e-6)
    demand.lost = 0.0
    demand.count_rests(plain=1e-4, saved=0.0, spent=10.0)
    assert demand.lost == pytest.approx(2.0)


def test_processes_add_up_what_they_lose(tmp_path, monkeypatch):
    """A command that keeps its programs begins with all options after enough calls of others."""
    target = specjax.load(specjax.shipped("tiny/target"))
    monkeypatch.setattr(kept_programs, "_folder", tmp_path)
    monkeypatch.setattr(kept_programs, "_surroundings", lambda: "this machine")
    call = prepared(target, PROMPT, **HOW)
    few = sys.modules["specjax.generation.warmup"]._few(call)
    known = sys.modules["specjax.generation.warmup"]._known(few)
    assert read_demand(*known) is None
    keep_demand(Demand((2, 4, 8), 5.0, 4.0), *known)
    with_options = sys.modules["specjax.generation.warmup"]._with_options
    assert with_options(call).decoder.proposer.options == SMALL
    # Two processes have read the 4 seconds, and each loses one more.
    one, two = read_demand(*known), read_demand(*known)
    for demand in (one, two):
        demand.lost += 1
        add_demand(demand, 1.0, *known)
    assert two.lost == 6.0
    assert read_demand(*known) == Demand((2, 4, 8), 5.0, 6.0)
    assert with_options(call) is call


def test_costs_depend_on_the_weights():
    """The same model in other numbers has costs of its own, as its draft has; other values of the
    same weights share them."""
    folder = specjax.shipped("tiny/target")
    wide = specjax.load(folder, "float32")
    half = jax.tree.map(lambda x: x.astype(jnp.float16), wide.params)
    other = jax.tree.map(lambda x: x + 1, wide.params)
    warmup = sys.modules["specjax.generation.warmup"]

    def keys(target, draft):
        drafter = specjax.adaptive(specjax.make_drafter(target, draft, num_drafts=2))
        call = prepared(target, PROMPT, **{**HOW, "drafter": drafter})
        return warmup._known(call), warmup._kind(call)

    def pair(params):
        return dataclasses.replace(wide, params=params)

    for asked in zip(
        *(keys(pair(params), pair(params)) for params in (wide.params, other)), strict=True
    ):
        assert asked[0] == asked[1]
    base = keys(wide, wide)
    for target, draft in ((pair(half), wide), (wide, pair(half))):
        known, kind = keys(target, draft)
        assert known != base[0] and kind != base[1]
