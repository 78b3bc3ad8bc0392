"""Samples of three tokens through a tiny model follow the model's own joint distribution, under every rule.

4000 texts a setting, 5^3 possible ones, chi-square at p < 1e-6.  Sound code fails one of the 48 checks with a chance
below 5e-5, and with the keys fixed here it either always does or never.  A bias whose chi-square divergence
sum((found - wanted)^2 / wanted) is 0.04 is caught with probability 0.99: for instance a joint distribution 10 % off in
total variation.  The wrong rules at the end show that the usual mistakes are beyond that.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import toys
from flax import struct

from specjax import (
    PROPOSERS,
    RULES,
    Decoder,
    DraftModel,
    NGram,
    NoProposer,
    Params,
    Rejection,
    Sampling,
    sampling,
    warp,
)
from specjax.rules import rejection

VOCAB, NEW, EACH = 5, 3, 4000
PROMPT = (2, 0, 2, 0)
CAPACITY = len(PROMPT) + NEW
IMPLAUSIBLE = 1e-6
SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot, top-k": {"temperature": 1.6, "top_k": 3},
    "top-p": {"top_p": 0.8},
    "all filters": {"temperature": 1.2, "top_k": 4, "top_p": 0.9, "min_p": 0.06},
    "greedy": {"temperature": 0.0},
}
DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

NET = toys.model(VOCAB, num_layers=1)
SMALLER = toys.model(VOCAB - 1, num_layers=1)
SHAPES = ((-1, 0, 0, 2), (-1, 0, 1, 0), (-1, 0, -1, 0))


@functools.cache
def weights(noise=0.0, vocab=VOCAB):
    """With a flatter head than that of `toys`, so that every text is likely enough; cut to `vocab` tokens."""
    params = toys.weights(VOCAB, 1, noise)
    head = {"kernel": 0.4 * params["head"]["kernel"][:, :vocab]}
    return {**params, "embedding": params["embedding"][:vocab], "head": head}


CASES = {
    "none": (NoProposer(), lambda: None),
    "draft": (DraftModel(SMALLER, VOCAB, 2), lambda: weights(0.05, VOCAB - 1)),
    "ngram": (NGram(num_drafts=2), lambda: None),
    "tree": (toys.SampledTree(NET, SHAPES), lambda: weights(0.05)),
}


def texts(proposer, params, rule):
    """[settings, EACH, NEW] tokens: one batch in which every row has its own settings and key, and its acceptance."""
    rows = EACH * len(SETTINGS)
    settings = [DEFAULTS | s for s in SETTINGS.values()]
    settings = {name: np.repeat([s[name] for s in settings], EACH) for name in DEFAULTS}
    dec = Decoder(NET, proposer, rule, (), CAPACITY)
    arrays = Params(weights(), params)
    state = dec.prefill(
        arrays,
        jnp.tile(jnp.array(PROMPT), (rows, 1)),
        jnp.full(rows, len(PROMPT)),
        limit=jnp.full(rows, CAPACITY),
        sampling=Sampling.create(rows, **settings),
        key=toys.keys(rows, seed=17),
    )
    state = dec.run(arrays, state)
    found = np.asarray(state.tokens)[:, len(PROMPT) : CAPACITY].reshape(len(SETTINGS), EACH, NEW)
    return found, jax.device_get(state.stats)


@functools.cache
def sampled(case, rule):
    """Of the tables; compiled and run once for all settings."""
    proposer, params = CASES[case]
    return texts(proposer, params(), RULES[rule]())


@functools.cache
def wanted(setting):
    """[VOCAB] * NEW: the exact joint distribution, by reading every possible text plainly."""
    every = np.stack(np.meshgrid(*[np.arange(VOCAB)] * NEW, indexing="ij"), axis=-1).reshape(-1, NEW)
    text = np.concatenate([np.tile(PROMPT, (len(every), 1)), every], axis=1)
    logits = toys.plain_logits(text, NET, weights())[:, len(PROMPT) - 1 : -1]
    warped = jax.jit(warp)(jnp.asarray(logits), Sampling.create(len(every), **SETTINGS[setting]))
    probs = np.asarray(jax.nn.softmax(warped), np.float64)
    chosen = np.take_along_axis(probs, every[:, :, None], axis=2)[:, :, 0].prod(1)
    return (chosen / chosen.sum()).reshape((VOCAB,) * NEW)


def p_value(found, setting):
    """Of the texts found; 0 where one of them is impossible."""
    counts = np.zeros((VOCAB,) * NEW)
    np.add.at(counts, tuple(found.T), 1)
    counts, expected = counts.ravel(), len(found) * wanted(setting).ravel()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    return scipy.stats.chisquare(counts, expected).pvalue if len(counts) > 1 else 1.0


def test_every_proposer_is_sampled():
    """A proposer that is added to the table has a case here."""
    assert {type(proposer) for proposer, _ in CASES.values()} >= set(PROPOSERS.values())


def test_the_settings_are_worth_testing():
    """The distributions are spread out, differ from each other, and filters leave texts out."""
    for setting in SETTINGS:
        possible = (wanted(setting) > 0).sum()
        assert possible == 1 if setting == "greedy" else possible >= 8
    assert (wanted("plain") > 0).all()
    assert np.abs(wanted("plain") - wanted("cold")).sum() > 0.2


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.exact])
@pytest.mark.parametrize("case", CASES)
def test_samples_follow_the_target(case, rule, setting):
    """Over several steps, in a batch of mixed settings, greedy rows among them."""
    found, stats = sampled(case, rule)
    assert p_value(found[list(SETTINGS).index(setting)], setting) > IMPLAUSIBLE
    if case != "none":  # speculation that never happens, or never fails, would prove nothing
        assert 0.1 < stats.accepted.sum() / stats.tested.sum() < 0.95


@struct.dataclass
class Silent:
    """No noise, and yet not shared: guesses are the draft's best tokens."""

    key: Any
    size: int = struct.field(pytree_node=False)
    shared = False

    def noise(self, node, depth):
        return jnp.zeros(self.size)


@dataclasses.dataclass(frozen=True)
class ArgmaxDraft(DraftModel):
    """Best tokens, handed in with the soft distribution that they were not drawn from."""

    def propose(self, params, state, pending, draw, warp):
        return super().propose(params, state, pending, Silent(draw.key, draw.size), warp)


@struct.dataclass
class Repeated:
    """The root's noise at every node."""

    inner: Any
    shared = False

    def noise(self, node, depth):
        return self.inner.noise(0, 0)


@dataclasses.dataclass(frozen=True)
class RepeatedNoise(DraftModel):
    """Draws a whole chain with one noise."""

    def propose(self, params, state, pending, draw, warp):
        return super().propose(params, state, pending, Repeated(draw), warp)


class ReusedNoise(Rejection):
    """Draws the residual token with the noise that the refused guess was drawn with."""

    def __call__(self, draw, proposal, logits, max_depth):
        verdict = super().__call__(draw, proposal, logits, max_depth)
        node, residual, _ = rejection.walk(
            draw.acceptance(len(proposal.tokens)), proposal, jax.nn.softmax(logits), jax.nn.softmax(proposal.logits)
        )
        return verdict.replace(next_token=sampling.argmax(jnp.log(residual) + draw.noise(node, 0)))


class SharedAcceptance(Rejection):
    """Accepts with the noise that the guess was drawn with."""

    def __call__(self, draw, proposal, logits, max_depth):
        @dataclasses.dataclass
        class Coupled:
            residual = draw.residual

            def acceptance(self, num_nodes):
                noise = jax.vmap(lambda node: draw.noise(node, 0))(jnp.maximum(proposal.parent, 0))
                return jnp.exp(-jnp.exp(-noise[jnp.arange(num_nodes), proposal.tokens]))

        return super().__call__(Coupled(), proposal, logits, max_depth)


class NoResidual(Rejection):
    """Draws the next token from the target, also after a refusal."""

    def __call__(self, draw, proposal, logits, max_depth):
        verdict = super().__call__(draw, proposal, logits, max_depth)
        node = verdict.path[verdict.num_accepted]
        return verdict.replace(next_token=sampling.argmax(logits[node] + draw.residual()))


WRONG = {
    "argmax drafts with soft probabilities": (ArgmaxDraft, Rejection, "plain"),
    "noise repeated along a chain": (RepeatedNoise, Rejection, "plain"),
    "noise reused for the residual": (DraftModel, ReusedNoise, "hot, top-k"),
    "noise shared with the acceptance": (DraftModel, SharedAcceptance, "plain"),
    "no residual": (DraftModel, NoResidual, "plain"),
}
"""The mistake, and the setting at which it shows."""


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_rules_are_caught(mistake):
    """The check has the power to see the mistakes that have been made; greedy decoding notices none of them."""
    proposer, rule, setting = WRONG[mistake]
    found, _ = texts(proposer(NET, VOCAB, 2), weights(0.12), rule())
    assert p_value(found[list(SETTINGS).index(setting)], setting) < IMPLAUSIBLE
    assert p_value(found[-1], "greedy") == 1
