"""The auditor measures inexact rules, reports, and refuses bad input.

`test_audit_sound.py` audits sound decoders, `test_audit_faults*.py` plant faults,
`test_audit_endpoint.py` audits servers.
"""

import importlib
import json

import numpy as np
import pytest
import scipy.stats
from audit_campaign import CAPACITY, CHAIN, CLEAN, EOS, NET, NEW, PROMPTS, VOCAB, Case

from specjax import Decoder, Match, Params, Typical, audit
from specjax.auditing import POWER, Check, Distribution, Report, chisquare

SIZES = {"samples": 4096}


def test_an_inexact_rule_is_measured_and_passes():
    """The report says that the rule is inexact, and how much."""
    report = Case(Typical(0.3, 0.8), noise=0.5).audit(0, samples=8192)
    assert report.passed
    (asked, *_) = report.distributions
    assert asked.p_value < 1e-6
    assert asked.total_variation > 1.5 * asked.expected
    assert not any(check.claimed for check in report.distributions)
    verdicts = {check.name: check.verdict for check in report.checks}
    assert verdicts["distribution"] == "inexact by design"
    # At temperature 0 this rule accepts the best token only.
    names = ("figures", "ends", "greedy", "greedy, samples", "row order")
    assert {verdicts[name] for name in names} == {"pass"}
    assert "(inexact)" in str(report)


def test_fresh_samples_decide_a_suspicion(monkeypatch):
    """One p-value just below the significance does not fail yet, and one just above it does not
    pass yet; one far below it fails at once."""
    again = []

    def first_unlucky(self, first, batches):
        again.append(batches)
        p_value = self.p_values[len(again) - 1]
        return [Distribution("distribution", True, p_value >= 1e-3, "", p_value=p_value)]

    # `specjax.audit` is the function, so the module is found by its full name.
    work = importlib.import_module("specjax.auditing.auditing")._Audit
    monkeypatch.setattr(work, "_sampled", first_unlucky)
    monkeypatch.setattr(work, "texts", lambda self: [])
    for p_values, passed, runs in (
        ((0.5,), True, 1),
        ((1e-4, 0.5), True, 2),
        ((1e-4, 1e-4), False, 2),
        ((8e-3, 1e-4), False, 2),
        ((8e-3, 8e-3), True, 2),
        ((2e-2,), True, 1),
        ((1e-9,), False, 1),
    ):
        again.clear()
        monkeypatch.setattr(work, "p_values", p_values, raising=False)
        assert CLEAN["match"].audit(0, **SIZES).passed is passed
        assert again == [8, 32][:runs]


def test_the_report_is_text_and_json(tmp_path):
    """Both hold what was checked, samples, power and verdict."""
    checks = (
        Check("greedy", True, True, "all", "float noise"),
        Check("ends", True, False, "few"),
        Distribution("distribution", False, False, "much", samples=64, detectable=0.25),
    )
    report = Report("a subject", checks, 1e-3)
    lines = str(report).splitlines()
    assert lines[0] == "a subject"
    assert [line.split("  ")[1:] for line in lines[2:5]] == [
        line.split("  ")[1:]
        for line in (
            "  greedy        float noise        all",
            "  ends          FAIL               few",
            "  distribution  inexact by design  much",
        )
    ]
    assert "distribution: 64 samples; a total variation of 0.250 would have been found" in lines[6]
    assert lines[-1] == "  FAILED: ends"
    report.write(str(tmp_path / "report.json"))
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["failures"] == ["ends"]
    assert written["passed"] is False
    assert written["power"] == POWER == 0.99
    assert [check["verdict"] for check in written["checks"]] == [
        "float noise",
        "FAIL",
        "inexact by design",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": [(1,), ()]}, "at least one token"),
        ({"prompts": [(1, VOCAB)]}, "token ids from 1 to 5; the vocabulary has 5"),
        ({"rows": 3}, "rows=3; it must be at least 4, two for each of the 2 prompts"),
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"num_tokens": NEW + 1}, f"num_tokens={NEW + 1}"),
        ({"samples": 10}, "samples=10; it must be at least 64"),
        ({"significance": 0.0}, "significance=0.0"),
        ({"seed": -1}, "seed=-1"),
        (
            {"temperature": 0.0},
            "temperature=0.0; it must be greater than 0, since 0 draws nothing",
        ),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": [1.0, 2.0]}, "temperature=.*one number, which all rows share"),
        ({"top_p": 0.0}, "top_p=0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0"),
        ({"logit_bias": {9: 1.0}}, "logit_bias holds the token 9"),
        ({"penalty": 2.0}, "penalty=2.0 is no setting of an audit"),
        (
            {"max_new_tokens": CAPACITY},
            f"prompt of 4 tokens and max_new_tokens={CAPACITY} do not fit into {CAPACITY}",
        ),
    ],
)
def test_bad_input_is_refused(change, message):
    """The error names the value before anything is compiled."""
    dec = Decoder(NET, CHAIN, Match(), (EOS,), CAPACITY)
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
