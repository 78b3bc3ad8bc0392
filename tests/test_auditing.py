"""The auditor passes sound decoders, reports inexact rules, and catches every known bug of
engines."""

import functools

import faults
import numpy as np
import pytest
import scipy.stats
import toys
import trees

from specjax import (
    BlockVerification,
    Decoder,
    DraftModel,
    Match,
    NGram,
    Params,
    Rejection,
    Typical,
    audit,
    metrics,
)
from specjax.audit import chisquare
from specjax.proposers import Chain

VOCAB, EOS, GAMMA, NEW = 5, 4, 2, 16
PROMPTS = [(2, 0, 2, 0), (1, 3)]
NET = toys.model(VOCAB, num_layers=1)
TREE = trees.SampledTree(NET, ((-1, 0, 0), (-1, 0, 1)))


def audited(proposer, rule, decoder=Decoder, noise=0.12, samples=8192, **settings):
    """The report on a small target with a draft that is often right."""
    dec = decoder(NET, proposer, rule, (EOS,), NEW + 4)
    params = Params(
        toys.flat(VOCAB), None if isinstance(proposer, NGram) else toys.flat(VOCAB, noise)
    )
    return audit(dec, params, PROMPTS, max_new_tokens=NEW, samples=samples, rows=512, **settings)


DRAFT = DraftModel(NET, VOCAB, GAMMA)
SOUND = {
    "match": (DRAFT, Match(), {}),
    "rejection": (DRAFT, Rejection(), {"temperature": faults.HOT, "top_p": faults.TOP_P}),
    "block": (DRAFT, BlockVerification(), {"top_k": faults.TOP_K}),
    "ngram": (NGram(GAMMA, min_ngram=1), BlockVerification(), {}),
    "tree": (TREE, Match(), {"samples": 2048}),
}


@pytest.mark.parametrize("case", SOUND)
def test_sound_decoders_pass(case):
    """All claims are checked, drafts were accepted and rejected, and a bias would have been
    seen."""
    proposer, rule, settings = SOUND[case]
    report = audited(proposer, rule, **settings)
    assert report.passed, str(report)
    names = {check.name for check in report.checks if check.claimed}
    wanted = {"figures", "greedy", "distribution"}
    wanted |= {"same key"} if rule.shared_noise else set()
    same_width = proposer.is_chain and not proposer.may_abstain
    assert names == (wanted | {"same bits"} if same_width else wanted)
    assert 0 < report.detectable < 0.2
    assert abs(report.total_variation - report.expected) < 0.02


def trap(proposer=Chain, rule=Rejection, decoder=Decoder, **settings):
    return functools.partial(
        audited, faults.drafting(proposer, NET, VOCAB, GAMMA), rule(), decoder, **settings
    )


TRAPS = {
    "argmax drafts accepted with soft probabilities": (trap(faults.ArgmaxDraft), "distribution"),
    "noise of a draft shared with its acceptance": (
        trap(rule=faults.SharedAcceptance),
        "distribution",
    ),
    "a residual draw for rows whose drafts were accepted": (
        trap(rule=faults.ResidualBonus),
        "distribution",
    ),
    "settings applied to the bonus token only": (
        trap(rule=faults.BonusOnly, decoder=faults.Unwarped, top_k=faults.TOP_K),
        "distribution",
    ),
    "settings frozen over a block": (
        trap(rule=faults.FrozenAtTheRoot, decoder=faults.Unwarped, top_k=faults.TOP_K),
        "distribution",
    ),
    "EOS inside a block": (
        trap(rule=Match, decoder=faults.EndsWithBlocks, samples=512),
        "same key",
    ),
    "accepted length counted past an end": (
        trap(decoder=faults.CountsPastTheEnd, samples=512),
        "figures",
    ),
    "padding rows in the statistics": (trap(decoder=faults.CountsPadding, samples=512), "figures"),
    "a residual of zero mass": (trap(rule=faults.EmptyResidual, samples=512), "greedy"),
    "top-p applied before temperature": (
        trap(
            rule=faults.TopPFirst,
            decoder=faults.Unwarped,
            temperature=faults.HOT,
            top_p=faults.TOP_P,
        ),
        "distribution",
    ),
    "rows of temperature 0 in a mixed batch": (trap(decoder=faults.MixedUp, samples=512), "greedy"),
}
"""Each fault, and the check that catches it. A draft cache one slot short only costs speed; it
has a test below."""


@pytest.mark.parametrize("name", TRAPS)
def test_traps_are_caught(name):
    """The named check catches the fault, and the report says so."""
    plant, check = TRAPS[name]
    report = plant()
    assert not report.passed
    assert check in report.failures
    assert f"FAILED: {', '.join(report.failures)}" in str(report)
    if check == "distribution":
        assert report.p_value < 1e-6


def test_a_draft_cache_one_short_is_caught_by_its_acceptance():
    """The auditor passes it, since only speed is lost; but a perfect draft is then rejected at
    times."""
    proposer = faults.drafting(faults.ShortCache, NET, VOCAB, GAMMA)
    assert audited(proposer, Rejection(), samples=512).passed
    perfect = Params(toys.flat(VOCAB), toys.flat(VOCAB))
    for draft, right in ((DRAFT, True), (proposer, False)):
        dec = Decoder(NET, draft, Rejection(), (), toys.CAPACITY)
        prompts = {"prompt": toys.PROMPTS % VOCAB, "limit": toys.LENGTHS + 24}
        state = dec.run(perfect, toys.prefill(dec, perfect, temperature=1.0, **prompts))
        assert (metrics.acceptance_rate(state.stats) == 1) is right


def test_an_inexact_rule_is_measured_and_passes():
    """The report says that the rule is inexact, and how much."""
    report = audited(DRAFT, Typical(0.3, 0.8))
    assert report.passed
    assert report.p_value < 1e-6
    assert report.total_variation > 2 * report.expected
    assert {check.name: check.verdict for check in report.checks} == {
        "figures": "pass",
        "greedy": "pass",
        "distribution": "inexact by design",
    }
    assert "(inexact)" in str(report)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": [(1,), ()]}, "at least one token"),
        ({"prompts": [(1, VOCAB)]}, "token ids from 1 to 5; the vocabulary has 5"),
        ({"rows": 3}, "rows=3 are too few for 2 prompts"),
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"num_tokens": NEW + 1}, f"num_tokens={NEW + 1}"),
        ({"samples": 10}, "samples=10; it must be at least 64"),
        ({"significance": 0.0}, "significance=0.0"),
        ({"temperature": 0.0}, "temperature=0.0 draws nothing"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0"),
        (
            {"max_new_tokens": NEW + 1},
            "prompt of 4 tokens and max_new_tokens=17 do not fit into 20",
        ),
    ],
)
def test_bad_input_is_refused(change, message):
    """The error names the value before anything is compiled."""
    dec = Decoder(NET, DRAFT, Match(), (EOS,), NEW + 4)
    options = {"prompts": PROMPTS, "max_new_tokens": NEW, **change}
    with pytest.raises(ValueError, match=message):
        audit(dec, Params(None), options.pop("prompts"), **options)


@pytest.mark.parametrize("degrees", [1, 2, 3, 8, 61, 400])
def test_chi_square_is_scipys(degrees):
    """The p-values agree with scipy, also far out in the tail."""
    for x in (1e-6, 0.3, degrees, 2.0 * degrees + 30, 900.0):
        assert chisquare.survival(x, degrees) == pytest.approx(
            scipy.stats.chi2.sf(x, degrees), rel=1e-9, abs=1e-300
        )
    for significance in (0.5, 1e-4, 1e-9):
        x = scipy.stats.chi2.isf(significance, degrees)
        assert chisquare.critical(significance, degrees) == pytest.approx(x, rel=1e-7)
        for noncentrality in (0.1, 5.0, 300.0):
            wanted = scipy.stats.ncx2.sf(x, degrees, noncentrality)
            assert chisquare.power(x, degrees, noncentrality) == pytest.approx(
                wanted, rel=1e-6, abs=1e-12
            )


def test_the_power_is_what_it_says():
    """In simulation, equal distributions fail as rarely as stated, and the smallest bias is
    found in 95 %."""
    rng, cells, samples, significance = np.random.default_rng(0), 20, 2000, 0.01
    even = np.full(cells, 1 / cells)
    bias = chisquare.detectable(samples, cells - 1, significance)
    other = even * (1 + 2 * bias * np.where(np.arange(cells) % 2, 1, -1))
    # The bound is tight if the bias has the shape of p + q, seen from the middle of the two.
    pairs = {"same": (even, even), "other": (even - (other - even) / 2, even + (other - even) / 2)}
    rate = {}
    for name, (p, q) in pairs.items():
        counts = zip(
            rng.multinomial(samples, p, 4000), rng.multinomial(samples, q, 4000), strict=True
        )
        rate[name] = np.mean(
            [
                chisquare.survival(chisquare.statistic(a, b), cells - 1) < significance
                for a, b in counts
            ]
        )
    assert 0.005 < rate["same"] < 0.016
    assert 0.935 < rate["other"] < 0.965


def test_the_smallest_bias_shrinks_with_the_samples():
    """It falls with the root of the number of samples; without samples nothing can be seen."""
    assert chisquare.detectable(4000, 30, 1e-4) == pytest.approx(
        chisquare.detectable(1000, 30, 1e-4) / 2
    )
    assert chisquare.detectable(1000, 0, 1e-4) == 1
    assert chisquare.survival(0.0, 0) == 1
