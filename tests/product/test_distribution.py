"""Samples of three tokens from a tiny model follow its exact joint distribution, under every rule.

There are 4000 texts per setting (200 where only one text is possible), 5^3 possible texts, and a
chi-square test at p < 1e-6. Correct code fails one of the 120 checks with a probability below 2e-4;
since the keys are fixed, it either always does or never. A bias with a chi-square divergence
sum((found - wanted)^2 / wanted) of 0.04 is caught with probability 0.99, for instance a joint
distribution 10 % off in total variation. The wrong rules at the end show that common mistakes are
larger than that.
"""

import functools

import faults
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import trees
from toys import TRANSFORMERS as toys

from specjax import (
    RULES,
    Datastore,
    DatastoreLookup,
    Decoder,
    DraftModel,
    DraftTree,
    DynamicTree,
    EarlyExit,
    FirstOf,
    Forced,
    Medusa,
    NGram,
    NoProposer,
    Params,
    Rejection,
    Sampling,
    Translation,
    Universal,
    UniversalParams,
    warp,
)
from specjax.models import MedusaHeads, SharedParams
from specjax.proposers import (
    Adaptive,
    BestFirst,
    Chain,
    CostAware,
    CostAwareParams,
    DatastoreSource,
    DraftSource,
    Eagle3Source,
    EarlyExitSource,
    MedusaParams,
    MedusaSource,
    StaticTree,
    TranslatedSource,
)
from specjax.proposers.sources import lookup

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
TEXTS = {name: 200 if name == "greedy" else EACH for name in SETTINGS}
DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

NET = toys.model(VOCAB, num_layers=1)
SMALLER = toys.model(VOCAB - 1, num_layers=1)
TRANSLATION = Translation(
    pieces=jnp.array([[0, 0], [2, 3], [1, 0], [0, 0], [4, 0]]),
    count=jnp.array([1, 2, 1, 0, 1]),
    to_draft=jnp.array([0, -1, 1, -1, 4]),
    start=jnp.zeros(0, jnp.int32),
)
"""Three tokens are shared, one of them by another name; one is spelt in two, and one not at all."""
SHAPES = ((-1, 0, 0, 2), (-1, 0, 1, 0), (-1, 0, -1, 0))


DEEPER = toys.model(VOCAB, num_layers=2)

weights = functools.partial(toys.flat, VOCAB)

HEADS = MedusaHeads(num_heads=2, hidden_size=32, vocab_size=VOCAB)


def medusa_params():
    bank = jax.tree.map(lambda leaf: leaf[None], toys.noisy_heads(HEADS, 0))
    return MedusaParams(bank, jnp.int32(0), {"head": weights()["head"]})


def eagle3_params(reduced=False):
    """Random weights of a head; with `reduced` it proposes three of the five tokens."""
    params = toys.eagle3_params(weights())
    if not reduced:
        return params
    own = {
        **params.own,
        "head": {"kernel": weights()["head"]["kernel"][:, :3]},
        "to_draft": jnp.array([0, -1, 1, 2, -1]),
    }
    return SharedParams(own, params.target)


def datastore():
    texts = np.random.default_rng(5).integers(0, VOCAB, (4, 40)).tolist()
    return Datastore.build(texts, vocab_size=VOCAB).arrays()


EAGLE3 = Eagle3Source(toys.EAGLE3, VOCAB, taps=(1, 0))

CASES = {
    "none": (NoProposer(), lambda: None),
    "draft": (DraftModel(SMALLER, VOCAB, 2), lambda: weights(0.05, VOCAB - 1)),
    "draft, 0 to 2 drafts a row": (
        DraftModel(SMALLER, VOCAB, 2),
        lambda: weights(0.05, VOCAB - 1),
    ),
    "draft with a confidence stop": (
        DraftModel(SMALLER, VOCAB, 2, 0.3),
        lambda: weights(0.05, VOCAB - 1),
    ),
    "draft tree": (DraftTree(SMALLER, VOCAB, (2, 2)), lambda: weights(0.05, VOCAB - 1)),
    "dynamic tree": (
        DynamicTree(DraftSource(SMALLER, VOCAB), 2, 2, 5),
        lambda: weights(0.05, VOCAB - 1),
    ),
    "adaptive": (
        Adaptive(NGram(2, min_ngram=1), Chain(DraftSource(SMALLER, VOCAB), 2), (1, 2, 3)),
        lambda: toys.adaptive((1.0, 1.05, 1.1, 1.3, 1.4), weights(0.05, VOCAB - 1)),
    ),
    "early exit": (EarlyExit(DEEPER, 1, 2), lambda: weights(layers=2)),
    "early exit tree": (StaticTree(EarlyExitSource(DEEPER, 1), (2, 1)), lambda: weights(layers=2)),
    "early exit dynamic tree": (
        DynamicTree(EarlyExitSource(DEEPER, 1), 2, 2, 4),
        lambda: weights(layers=2),
    ),
    "eagle3": (Chain(EAGLE3, 2), eagle3_params),
    "eagle3, a reduced vocabulary": (Chain(EAGLE3, 2), lambda: eagle3_params(reduced=True)),
    "eagle3 tree, a reduced vocabulary": (
        StaticTree(EAGLE3, (2, 1)),
        lambda: eagle3_params(reduced=True),
    ),
    "eagle3 dynamic tree": (DynamicTree(EAGLE3, 2, 2, 4), eagle3_params),
    "first of": (
        FirstOf(NGram(2, min_ngram=2), DraftModel(SMALLER, VOCAB, 2)),
        lambda: (None, weights(0.05, VOCAB - 1)),
    ),
    "medusa": (Medusa(HEADS, ((0,), (1,), (0, 0))), medusa_params),
    "best first": (BestFirst(MedusaSource(HEADS), 5, 2), medusa_params),
    "best first, cost-aware": (
        CostAware(BestFirst(MedusaSource(HEADS), 5, 2), (1, 3, 5)),
        lambda: CostAwareParams(medusa_params(), jnp.array([1.0, 1.3, 1.6])),
    ),
    "forced": (Forced(2), lambda: None),  # `test_constraint_laws.py` samples it with a constraint
    "ngram": (NGram(num_drafts=2), lambda: None),
    "datastore": (DatastoreLookup(VOCAB, 2, min_share=0.25), lambda: datastore()),
    "datastore tree": (DatastoreLookup(VOCAB, branching=(2, 1)), lambda: datastore()),
    "datastore dynamic tree": (DynamicTree(DatastoreSource(VOCAB), 2, 2, 4), lambda: datastore()),
    "universal": (Universal(NET, VOCAB, 2), lambda: UniversalParams(weights(0.05), TRANSLATION)),
    "translated tree": (
        StaticTree(TranslatedSource(NET, VOCAB), (2, 1)),
        lambda: UniversalParams(weights(0.05), TRANSLATION),
    ),
    "translated dynamic tree": (
        DynamicTree(TranslatedSource(NET, VOCAB), 2, 2, 4),
        lambda: UniversalParams(weights(0.05), TRANSLATION),
    ),
    "tree": (trees.SampledTree(NET, SHAPES), lambda: weights(0.05)),
}


@pytest.fixture(scope="module", autouse=True)
def _small_look_ups():
    """A corpus of 160 tokens out of 5 needs no table of 1024 entries for each row and level."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "_TABLE", 32)
        patch.setattr(lookup, "_SAMPLE", 40)
        yield


def texts(proposer, params, rule, layers=1, num_drafts=None):
    """Tokens [texts, NEW] of each setting, and figures: one batch in which every row has its own
    settings and key."""
    each = list(TEXTS.values())
    rows = sum(each)
    settings = [DEFAULTS | s for s in SETTINGS.values()]
    settings = {name: np.repeat([s[name] for s in settings], each) for name in DEFAULTS}
    dec = Decoder(DEEPER if layers == 2 else NET, proposer, rule, (), CAPACITY)
    arrays = Params(weights(layers=layers), params)
    state = dec.prefill(
        arrays,
        jnp.tile(jnp.array(PROMPT), (rows, 1)),
        jnp.full(rows, len(PROMPT)),
        limit=jnp.full(rows, CAPACITY),
        sampling=Sampling.create(rows, **settings),
        key=toys.keys(rows, seed=17),
        num_drafts=num_drafts,
    )
    state = dec.run(arrays, state)
    tokens = np.split(np.asarray(state.tokens)[:, len(PROMPT) : CAPACITY], np.cumsum(each)[:-1])
    return dict(zip(SETTINGS, tokens, strict=True)), jax.device_get(state.stats)


@functools.cache
def sampled(case, rule):
    """The texts and figures of a case, compiled and run once for all settings."""
    proposer, params = CASES[case]
    bounds = np.arange(sum(TEXTS.values()), dtype=np.int32) % 3 if "a row" in case else None
    return texts(proposer, params(), RULES[rule](), layers(case), bounds)


def layers(case):
    """The layers of the target: early exit needs one that it can skip."""
    return 2 if case.startswith("early exit") else 1


@functools.cache
def wanted(setting, layers=1):
    """[VOCAB] * NEW: the exact joint distribution, by reading every possible text in a plain
    pass."""
    every = np.stack(np.meshgrid(*[np.arange(VOCAB)] * NEW, indexing="ij"), axis=-1).reshape(
        -1, NEW
    )
    text = np.concatenate([np.tile(PROMPT, (len(every), 1)), every], axis=1)
    logits = toys.plain_logits(text, DEEPER if layers == 2 else NET, weights(layers=layers))[
        :, len(PROMPT) - 1 : -1
    ]
    warped = jax.jit(warp)(jnp.asarray(logits), Sampling.create(len(every), **SETTINGS[setting]))
    probs = np.asarray(jax.nn.softmax(warped), np.float64)
    chosen = np.take_along_axis(probs, every[:, :, None], axis=2)[:, :, 0].prod(1)
    return (chosen / chosen.sum()).reshape((VOCAB,) * NEW)


def p_value(sample, setting, layers=1):
    """The p-value of the texts under a setting."""
    return chi_square(sample, wanted(setting, layers))


def chi_square(sample, joint):
    """The p-value of texts [rows, NEW] under their joint distribution; 0 if one of them is
    impossible."""
    counts = np.zeros((VOCAB,) * NEW)
    np.add.at(counts, tuple(sample.T), 1)
    counts, expected = counts.ravel(), len(sample) * joint.ravel()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    return scipy.stats.chisquare(counts, expected).pvalue if len(counts) > 1 else 1.0


def test_every_proposer_is_sampled():
    """Every proposer of the table and every shape over every source has a case here."""
    assert {toys.kind(proposer) for proposer, _ in CASES.values()} >= toys.KINDS


def test_the_settings_are_worth_testing():
    """The distributions are spread out, differ from each other, and filters exclude texts."""
    for setting in SETTINGS:
        possible = (wanted(setting) > 0).sum()
        assert possible == 1 if setting == "greedy" else possible >= 8
    assert (wanted("plain") > 0).all()
    assert np.abs(wanted("plain") - wanted("cold")).sum() > 0.2


PRODUCTS = {
    "early exit tree", "early exit dynamic tree", "translated tree", "translated dynamic tree",
    "eagle3 dynamic tree", "datastore dynamic tree",
}  # fmt: skip
"""Their shape is sampled over a draft model, and their source in a chain."""


def sampled_by_default(case, rule):
    """Under `match` every proposer writes the text of plain decoding, token by token
    (`tests/core/test_laws.py`), and `block` judges the same chains as `rejection`."""
    return (rule == "rejection" and case not in PRODUCTS) or (case, rule) in {
        ("none", "match"), ("draft", "match"), ("none", "block"), ("draft", "block"),
        ("draft, 0 to 2 drafts a row", "block"), ("ngram", "block"),
    }  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("case", "rule"),
    [
        pytest.param(case, name, marks=() if sampled_by_default(case, name) else pytest.mark.slow)
        for case, (proposer, _) in CASES.items()
        for name, rule in RULES.items()
        if rule.exact and (proposer.is_chain or not rule.chain_only)
    ],
)
def test_samples_follow_the_target(case, rule, setting):
    """This holds over several steps, in a batch of mixed settings with greedy rows."""
    sample, stats = sampled(case, rule)
    assert p_value(sample[setting], setting, layers(case)) > IMPLAUSIBLE
    if case not in (
        "none",
        "forced",
    ):  # without drafts, or without rejections, the test would prove nothing
        assert 0.1 < stats.accepted.sum() / stats.tested.sum() < 0.95


WRONG = {
    "argmax drafts with soft probabilities": (faults.ArgmaxDraft, Rejection, "plain"),
    "noise repeated along a chain": (faults.RepeatedNoise, Rejection, "plain"),
    "drafts dropped for their own outcome": (faults.DropsUnlikely, Rejection, "plain"),
    "noise reused for the residual": (Chain, faults.ReusedNoise, "hot, top-k"),
    "noise shared with the acceptance": (Chain, faults.SharedAcceptance, "plain"),
    "no residual": (Chain, faults.NoResidual, "plain"),
}
"""The mistake, and the setting at which it shows."""


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_rules_are_caught(mistake):
    """The check sees typical mistakes, none of which greedy decoding would notice."""
    proposer, rule, setting = WRONG[mistake]
    sample, _ = texts(faults.drafting(proposer, NET, VOCAB, 2), weights(0.12), rule())
    assert p_value(sample[setting], setting) < IMPLAUSIBLE
    assert p_value(sample["greedy"], "greedy") == 1
