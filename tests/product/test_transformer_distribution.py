"""Samples of three tokens from a tiny transformer follow its exact joint distribution, under every
rule; `distributions.py` says how many, and what they can see."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees
from distributions import (
    IMPLAUSIBLE,
    SETTINGS,
    SHAPES,
    TRANSLATION,
    VOCAB,
    WRONG,
    Distributions,
)
from toy_models import ASSISTANT, MTP
from toys import KINDS, TRANSFORMERS, kind

from specjax import (
    RULES,
    Datastore,
    DatastoreLookup,
    DraftTree,
    DynamicTree,
    EarlyExit,
    Medusa,
    UniversalParams,
)
from specjax.methods import (
    AssistantSource,
    DatastoreSource,
    DraftSource,
    Eagle3Source,
    EarlyExitSource,
    MedusaHeads,
    MedusaParams,
    MedusaSource,
    MtpLayersSource,
    MtpSource,
    SharedParams,
    TranslatedSource,
)
from specjax.methods.datastore import lookup
from specjax.proposers import BestFirst, Calibrated, Chain, CostAware, CostAwareParams, StaticTree

TOYS = Distributions(TRANSFORMERS)
NET, DEEPER, weights = TOYS.net(), TOYS.net(layers=2), TOYS.weights

HEADS = MedusaHeads(num_heads=2, hidden_size=32, vocab_size=VOCAB)


def medusa_params():
    bank = jax.tree.map(lambda leaf: leaf[None], TRANSFORMERS.noisy_heads(HEADS, 0))
    return MedusaParams(bank, jnp.int32(0), {"head": weights()["head"]})


def eagle3_params(reduced=False):
    """Random weights of a head; with `reduced` it proposes three of the five tokens."""
    params = TRANSFORMERS.eagle3_params(weights())
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


def mtp_params():
    return TRANSFORMERS.mtp_params(weights())


def mtp_layers_params():
    return TRANSFORMERS.mtp_layers_params(weights())


def assistant_params():
    return TRANSFORMERS.assistant_params(weights())


EAGLE3 = Eagle3Source(TRANSFORMERS.EAGLE3, VOCAB, taps=(1, 0))
MTP_LAYER = MtpSource(MTP, VOCAB, taps=(1,))
MTP_LAYERS = MtpLayersSource(MTP, VOCAB, taps=(1,), num_layers=2)
ASSISTANTS = AssistantSource(ASSISTANT, VOCAB, leaves=(0, 0), taps=(1,))

CASES = {
    **TOYS.CASES,
    "draft tree": (DraftTree(TOYS.small.model, VOCAB, (2, 2)), lambda: TOYS.drafting),
    "dynamic tree": (
        DynamicTree(TOYS.small, 2, 2, 5),
        lambda: TOYS.drafting,
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
    "mtp": (Chain(MTP_LAYER, 2), mtp_params),
    "mtp tree": (StaticTree(MTP_LAYER, (2, 1)), mtp_params),
    "mtp dynamic tree": (DynamicTree(MTP_LAYER, 2, 2, 4), mtp_params),
    "mtp layers": (Chain(MTP_LAYERS, 2), mtp_layers_params),
    "mtp layers tree": (StaticTree(MTP_LAYERS, (2, 1)), mtp_layers_params),
    "mtp layers dynamic tree": (DynamicTree(MTP_LAYERS, 2, 2, 4), mtp_layers_params),
    "assistant": (Chain(ASSISTANTS, 2), assistant_params),
    "assistant tree": (StaticTree(ASSISTANTS, (2, 1)), assistant_params),
    "assistant dynamic tree": (DynamicTree(ASSISTANTS, 2, 2, 4), assistant_params),
    "dynamic tree, calibrated": (
        Calibrated(DynamicTree(TOYS.small, 2, 2, 4)),
        lambda: TOYS.drafting,
    ),
    "medusa": (Medusa(HEADS, ((0,), (1,), (0, 0))), medusa_params),
    "best first": (BestFirst(MedusaSource(HEADS), 5, 2), medusa_params),
    "best first, cost-aware": (
        CostAware(BestFirst(MedusaSource(HEADS), 5, 2), (1, 3, 5)),
        lambda: CostAwareParams(medusa_params(), jnp.array([1.0, 1.3, 1.6])),
    ),
    "datastore": (DatastoreLookup(VOCAB, 2, min_share=0.25), lambda: datastore()),
    "datastore tree": (DatastoreLookup(VOCAB, branching=(2, 1)), lambda: datastore()),
    "datastore dynamic tree": (DynamicTree(DatastoreSource(VOCAB), 2, 2, 4), lambda: datastore()),
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


@functools.cache
def sampled(case, rule):
    """The texts and figures of a case, compiled and run once for all settings."""
    proposer, params = CASES[case]
    return TOYS.texts(proposer, params(), RULES[rule](), layers(case), "a row" in case)


def layers(case):
    """The layers of the target: early exit needs one that it can skip."""
    return 2 if case.startswith("early exit") else 1


def test_every_proposer_is_sampled():
    """Every proposer of the table and every shape over every source has a case here."""
    assert {kind(proposer) for proposer, _ in CASES.values()} >= KINDS


def test_the_settings_are_worth_testing():
    TOYS.check_the_settings()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("case", "rule"),
    [  # a share takes all settings of a program
        pytest.param(case, name, marks=pytest.mark.xdist_group(f"samples-{case}-{name}"))
        for case, (proposer, _) in CASES.items()
        for name, rule in RULES.items()
        if rule.exact and (proposer.is_chain or not rule.chain_only)
    ],
)
def test_samples_follow_the_target(case, rule, setting):
    """This holds over several steps, in a batch of mixed settings with greedy rows."""
    sample, stats = sampled(case, rule)
    assert TOYS.p_value(sample[setting], setting, layers(case)) > IMPLAUSIBLE
    # Without drafts, or without rejections, the test would prove nothing.
    if case not in ("none", "forced"):
        assert 0.1 < stats.accepted.sum() / stats.tested.sum() < 0.95


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_rules_are_caught(mistake):
    """The check sees typical mistakes, none of which greedy decoding would notice."""
    TOYS.check_a_mistake(mistake, DraftSource(NET, VOCAB), weights(0.12))
