"""The parts of the benchmark of serving; its contestants are tested where they are from."""

from __future__ import annotations

import load
import pytest

from bench.serve import ServeOptions, Taken, main, requests, row, share, table


def test_figures_are_medians_and_percentiles():
    turns = [Taken(2.0, 100, [0.1, 0.3], [0.01], 0.02), Taken(1.0, 100, [0.2], [0.03], 0.04)]
    made = row("engine", [*turns, Taken(4.0, 100)])
    assert made["tokens_per_second"] == 50
    assert (made["first_p50_ms"], made["between_p50_ms"]) == pytest.approx((200, 20))
    assert made["first_p99_ms"] == pytest.approx(298) and made["host_share"] == pytest.approx(0.03)
    plain = row("offline", [Taken(1.0, 30)])
    offline = [Taken(1.0, 100), Taken(2.0, 100), Taken(4.0, 100)]  # as long as the engine's others
    shares = {"engine, as offline": share([Taken(2.0, 100) for _ in offline], offline)}
    assert shares["engine, as offline"] == (1.0, 0.5, 2.0)
    lines = table({"rows": [made, plain], "shares": shares}).splitlines()
    assert lines[4] == "engine, as offline: 1.00 of the offline batch (0.50 to 2.00)"
    assert lines[2] == "| engine | 50.0 | 200.0 | 298.0 | 20.0 | 29.8 | 0.030 |"
    assert lines[3] == "| offline | 30.0 |  |  |  |  |  |"


def test_requests_are_the_same_in_every_run():
    arguments = ServeOptions(requests=5, prompt_length=7)
    target = load.models()[0]
    work = requests(arguments, target)
    assert work == requests(arguments, target) and len(work) == 5
    assert all(len(prompt) <= 7 and 16 <= new <= 128 for prompt, new in work)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--slots", "0"], "--slots must be at least 1"),
        (["--num-drafts", "0"], "--num-drafts must be at least 1"),
        (["--new-tokens", "9", "3"], "--new-tokens 9 3"),
        (["--only", "bach", "--target", "nowhere"], "--only bach: there are one by one, plain; "),
    ],
)
def test_refused(words, message):
    with pytest.raises(ValueError, match=message):
        main(words)
