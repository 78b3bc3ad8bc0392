"""How `Adaptive` chooses: rates of recent drafts, what trials may cost, and what a batch waits."""

import collections
import dataclasses
import functools

import jax
import numpy as np
import pytest
import scipy.stats
from compiled_choice import chosen as choose

from specjax.proposers.adaptive import choosing
from specjax.proposers.adaptive.choosing import Part
from specjax.proposers.adaptive.policy import POLICY, Policy
from specjax.proposers.adaptive.rates import Rates
from specjax.proposers.adaptive.trials import Trials

WINDOWS = POLICY.windows
WIDTHS = (1, 3, 5)
AFTER, GAINS = jax.jit(Rates.after), jax.jit(Rates.gains)


@functools.partial(jax.jit, static_argnums=(0, 1))
def start(rows, depth, prior):
    return Rates.start(rows, depth, prior)


def test_rates_are_those_of_recent_drafts():
    """Counts by window and depth, the weights of the windows and the expected tokens, by a loop.

    The first step has one draft, which is right.
    """
    rng, depth, prior = np.random.default_rng(1), 3, 0.3
    rates, alone = start(1, depth, np.float32(prior)), np.array(False)
    after, gains = AFTER, GAINS
    recent, by_depth = np.zeros((4, 2)), np.zeros((depth, 2))
    weight = belief = np.array(WINDOWS) / sum(WINDOWS)

    def chance(window, at):
        known = POLICY.prior_share * max(WINDOWS[window] - recent[window, 0], 0)
        level = (recent[window, 1] + known * prior) / max(recent[window, 0] + known, 1)
        judged, accepted = by_depth.sum(0)
        alike = POLICY.alike * (accepted + prior) / (judged + 1)
        usual = by_depth[at, 0] * accepted / max(judged, 1)
        return np.clip(
            level * (by_depth[at, 1] + alike) / (usual + alike), 1 - POLICY.most, POLICY.most
        )

    for _ in range(60):
        offered = int(rng.integers(0, depth + 1))
        taken = int(rng.integers(0, offered + 1))
        rates = after(rates, np.array([offered]), np.array([taken]), np.float32(prior), alone)
        right = [at < taken for at in range(min(offered, taken + 1))]
        if right:
            likely = [
                np.prod(
                    [chance(w, at) if yes else 1 - chance(w, at) for at, yes in enumerate(right)]
                )
                for w in range(4)
            ]
            weight = weight * likely / (weight * likely).sum()
            weight = (1 - POLICY.dealt) * weight + POLICY.dealt * belief
        for w, window in enumerate(WINDOWS):
            recent[w] = recent[w] * (1 - 1 / window) ** len(right) + [len(right), sum(right)]
        for at, yes in enumerate(right):
            by_depth[at] = by_depth[at] * POLICY.kept + [1, yes]
        for present in range(depth + 1):
            wanted = np.ones(depth + 1)
            for at in range(present):
                reached = [np.prod([chance(w, up) for up in range(at + 1)]) for w in range(4)]
                wanted[at + 1 :] += weight @ reached
            found = gains(rates, np.array([present]))
            np.testing.assert_allclose(found[0], wanted, rtol=1e-4)
    np.testing.assert_allclose(rates.recent[0], recent, rtol=1e-4)
    np.testing.assert_allclose(rates.weight[0], weight, rtol=1e-3)


@pytest.mark.parametrize("prior", [0.0, 1.0])
def test_a_prior_of_nothing_or_all_leaves_numbers(prior):
    """Drafts of which no earlier one was accepted, or each one."""
    prior, alone, all_of = np.float32(prior), np.array(False), np.full(2, 4)
    rates = start(2, 4, prior)
    for accepted in (0, 4, 0):
        gains = np.asarray(GAINS(rates, all_of))
        assert (gains >= 1).all() and (np.diff(gains, axis=1) >= 0).all()  # NaN is neither
        rates = AFTER(rates, all_of, np.full(2, accepted), prior, alone)


def test_surprises_at_every_depth_leave_numbers():
    """The chance of 60 drafts that were all expected to fail is no float32 number but 0."""
    prior, alone, deep = np.float32(0.0), np.array(False), np.array([60])
    rates = AFTER(start(1, 60, prior), deep, deep, prior, alone)
    np.testing.assert_allclose(np.asarray(rates.weight).sum(), 1.0, rtol=1e-5)
    assert np.isfinite(GAINS(rates, deep)).all()


@pytest.mark.parametrize(("before", "after", "steps"), [(0.95, 0.1, 10), (0.1, 0.95, 10)])
def test_rates_follow_a_text_that_changes(before, after, steps):
    """After 200 steps of one kind and a few of another, the expected tokens are nearer the new."""
    rng, all_of = np.random.default_rng(1), np.full(16, 2)
    about = np.float32(before), np.array(False)
    rates = start(16, 2, about[0])
    for at in range(200 + steps):
        right = rng.random((16, 2)) < (before if at < 200 else after)
        rates = AFTER(rates, all_of, np.cumprod(right, 1).sum(1), *about)
    found = float(np.asarray(GAINS(rates, all_of))[:, 2].mean())
    old, new = (1 + rate + rate**2 for rate in (before, after))
    assert abs(found - new) < abs(found - old)


def test_rows_of_a_batch_teach_each_other():
    """A row without drafts expects what those of its batch had, and only where it may."""
    rates = start(5, 1, np.float32(0.5))
    offered, taken = np.array([0, 1, 1, 1, 1]), np.zeros(5, np.int32)
    for together in (False, True):
        about = np.float32(0.5), np.array(together)
        known = rates
        for _ in range(40):
            known = AFTER(known, offered, taken, *about)
        first = float(np.asarray(GAINS(known, np.ones(5, np.int32)))[0, 1]) - 1
        assert first == pytest.approx(0.5) if not together else first < 0.15


def test_all_drafts_are_those_of_the_longest_window():
    """The windows ascend, so the longest is the last one."""
    rates = dataclasses.replace(
        start(2, 3, np.float32(0.5)), recent=np.arange(16.0).reshape(2, 4, 2)
    )
    np.testing.assert_array_equal(rates.slow, [[6, 7], [14, 15]])


def parts(rates, budget=0.0, rows=1, unused=99):
    """Parts of the same acceptance at every depth."""
    none = np.zeros(rows, np.float32)
    trials = Trials(
        np.full(rows, unused), np.full(rows, 2), np.full(rows, budget, np.float32), none
    )
    gains = [[sum(rate**at for at in range(width)) for width in WIDTHS] for rate in rates]
    return [
        Part(
            name, np.broadcast_to(np.array(each, np.float32), (rows, 3)), np.ones(rows, bool),
            np.zeros(rows, np.float32), trials,
        )
        for name, each in zip(("lookup", "drafter"), gains, strict=False)
    ]  # fmt: skip


def chosen(seconds, made, rows=1, remaining=512, together=True):
    remaining = np.broadcast_to(np.array(remaining), rows)
    return choose(WIDTHS, seconds, made, np.ones(rows, bool), remaining, together)


def test_a_trial_is_one_that_can_be_paid():
    """Two drafts that are right one time in ten take 1.5 passes, and lose 0.39."""
    seconds = (1.0, 1.5, 2.0)
    for budget, unused, tried in ((0.3, 99, False), (0.4, 99, True), (0.4, 1, False)):
        made = chosen(seconds, parts([0.1], budget, unused=unused))
        assert bool(made.tried[0]) == tried and int(made.option[0]) == tried
        assert float(made.time[0]) == pytest.approx(1.5 if tried else 1.0)
    # Drafts go on without a pause while sixteen more steps of them could be paid.
    for budget, tried in ((6.0, False), (6.5, True)):
        assert bool(chosen(seconds, parts([0.1], budget, unused=0)).tried[0]) == tried


def test_a_trial_is_of_the_part_alone():
    """Beside a lookup that is always right, drafts that seldom are lose more than they cost."""
    seconds, rates = (1.0, 1.0, 1.0, 1.2, 1.4), (0.99, 0.1)
    worth = 1 / (1 + 0.99 + 0.99**2 + 0.99**3 + 0.99**4)
    loss = 1.2 - 1.11 * worth
    for budget in (loss - 0.01, loss + 0.01):
        made = chosen(seconds, parts(rates, budget))
        assert int(made.option[0]) == (3 if budget > loss else 2)
    assert float(made.worth[0]) == pytest.approx(worth, rel=1e-3)


def test_drafts_of_a_better_part_take_their_place_at_once():
    """Drafts of the last step go on as trials only where the step would have none otherwise."""
    seconds, rates = (1.0, 1.1, 1.2, 1.25, 1.45), (0.7, 0.69)  # the drafter pays, but less
    lookup, drafter = parts(rates, 8.0, unused=0)
    made = chosen(seconds, [lookup, drafter])
    assert int(made.option[0]) == 2 and not made.tried[0]
    nothing = dataclasses.replace(lookup, gains=np.ones_like(lookup.gains), able=np.zeros(1, bool))
    assert int(chosen(seconds, [nothing, drafter]).option[0]) == 4
    due = dataclasses.replace(drafter.trials, unused=np.full(1, 2))
    assert chosen(seconds, [lookup, dataclasses.replace(drafter, trials=due)]).tried[0]


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_batch_waits_for_its_last_row(rows):
    """Two drafts gain what rows lose that drift apart: by simulation, at 512 tokens."""
    rng, rate = np.random.default_rng(0), 0.3
    gain = 1 + rate + rate**2
    right = rng.random((300, rows, 512, 2)) < rate
    tokens = 1 + np.cumprod(right, axis=3).sum(3)
    last = (np.cumsum(tokens, axis=2) < 512).sum(2).max(1) + 1
    even = 512 / last.mean()  # the tokens of a step, with the wait for the last row
    for offset, drafts in ((-0.03, True), (0.02, False)):
        made = chosen((1.0, (even + offset), 9.0), parts([rate], rows=rows), rows=rows)
        assert bool(made.option[0]) == drafts, (rows, gain, even)
    # Rows that decide alone do not wait for the others.
    alone = chosen((1.0, gain - 0.02, 9.0), parts([rate], rows=rows), rows=rows, together=False)
    assert np.asarray(alone.option).all()


def test_rows_that_are_far_apart_do_not_wait_for_drafts():
    """In a server the rows are at different places of their texts, and none waits for another."""
    rows, gain = 16, 1 + 0.3 + 0.3**2
    for remaining, drafts in ((512, False), (np.arange(16) * 60, True)):
        made = chosen((1.0, gain - 0.03, 9.0), parts([0.3], rows=rows), rows, remaining)
        assert bool(made.option[0]) == drafts


def test_a_policy_of_ones_own():
    """With a margin of a third, drafts that promise a fifth more are left out."""
    alive, one = np.ones(1, bool), np.full(1, 512)
    made = parts([0.5], unused=1)  # 1.75 tokens with two drafts, and no trial is due
    for policy, drafts in ((POLICY, True), (Policy(margin=1 / 3), False)):
        seconds = np.array([1.0, 1.75 / 1.2, 9.0], np.float32)
        found = jax.jit(
            lambda seconds, policy=policy: (
                choosing.choose(WIDTHS, seconds, made, alive, one, True, policy).option
            )
        )(seconds)
        assert (int(found[0]) > 0) is drafts
    for wrong in ({"margin": 0}, {"windows": ()}, {"stays": -1.0}, {"won": float("nan")}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*above 0"):
            Policy(**wrong)


def test_a_batch_drafts_only_where_the_margin_is_left_after_the_wait():
    """Drafts that promise half as much more lose it to the wait of four rows with ten tokens left.

    Without the wait they exceed both margins, and with it only the smaller one.
    """
    alive, left = np.ones(4, bool), np.full(4, 10)
    seconds = np.array([1.0, 1.75 / 1.5, 99.0], np.float32)
    gains, last = np.array([1.0, 1.75, 1.9]), scipy.stats.norm.ppf((4 - 0.375) / (4 + 0.25))
    wait = 1 / (1 - min(last * spread(gains)[0] / np.sqrt(10), 0.5))
    assert 1.1 < 1.5 / wait < 1.3
    made = parts([0.5], rows=4, unused=1)
    for margin, drafts in ((0.1, True), (0.3, False)):
        policy = Policy(margin=margin)
        found = choosing.choose(WIDTHS, seconds, made, alive, left, True, policy)
        assert np.asarray(found.option > 0).all() == drafts


def spread(gains):
    """The deviation of the tokens of a step over the root of their mean, at each width but 1."""
    chances = np.diff(gains) / np.diff(WIDTHS)  # that all drafts of a width are right
    found = []
    for last in range(1, len(WIDTHS)):
        shares = [1.0, *chances[:last], 0.0]
        tokens = {WIDTHS[at]: shares[at] - shares[at + 1] for at in range(last + 1)}
        mean = sum(number * share for number, share in tokens.items())
        square = sum(number**2 * share for number, share in tokens.items())
        found.append(np.sqrt(max(square - mean**2, 0.0) / mean))
    return np.array(found)


def naive_choice(seconds, made, alive, remaining, together):
    """What `choose` returns, row by row: option, time, worth, trial and weight."""
    rows, plain, steps = len(alive), seconds[0], len(WIDTHS) - 1
    live = [row for row in range(rows) if alive[row]]
    count, together = max(len(live), 1), together and rows > 1
    left = np.zeros(rows) if remaining is None else np.where(alive, remaining, 0.0)
    most = max(left.max(), 1.0)
    weight = np.where(alive, np.exp((left - most) / (POLICY.apart * np.sqrt(most))), 0.0)
    weight = weight / weight.sum() if live and rows > 1 else np.where(rows == 1, 1.0, weight)

    def wait(gains):
        if not together or remaining is None:
            return np.ones(steps)
        ahead = max(sum(left[live]) / count, 1.0)
        apart = sum((left[row] - ahead) ** 2 for row in live) / count
        more = ahead * spread(gains) ** 2
        apart = np.maximum(apart - more, 0.0)
        added = np.sqrt(apart + more) - np.sqrt(apart)
        last = scipy.stats.norm.ppf((count - 0.375) / (count + 0.25))
        return 1 / (1 - np.minimum(last * added / ahead, 0.5))

    choices = []
    for row in range(rows):
        best, options, quotients = np.ones((rows, len(WIDTHS))), [], [1 + POLICY.margin]
        for at, part in enumerate(made):
            late = max(part.late[live], default=0.0) if together else part.late[row] * alive[row]
            own = seconds[1 + at * steps : 1 + (at + 1) * steps] / plain
            best = np.maximum(best, part.gains)
            gains = [
                np.maximum(weight @ x, 1.0) if together else x[row] for x in (best, part.gains)
            ]
            times = [own * wait(each) for each in gains]
            gains = [each[1:] for each in gains]
            pays = gains[0] / (times[0] + late / POLICY.stays) > 1 + POLICY.margin
            quotients += np.where(pays, gains[0] / (own + late / POLICY.stays), 0.0).tolist()
            options.append((gains, [each + late for each in times]))
        option = int(np.argmax(quotients))
        gains = [1.0, *(x for made, _ in options for x in made[0])]
        times = [1.0, *(x for _, made in options for x in made[0])]
        worth, trials = times[option] / gains[option], []
        for at, (own, needed) in enumerate(options):
            losses = needed[1] - own[1] * worth
            trials.append((1 + at * steps, losses.min(), losses.argmin(), needed[1]))
        choices.append((option, times[option], worth, trials))
    tries = np.zeros((rows, len(made)), bool)
    for row, (option, _, _, trials) in enumerate(choices):
        for at, (part, (_, loss, _, _)) in enumerate(zip(made, trials, strict=True)):
            known = part.trials
            on = option == 0 and POLICY.ahead * loss <= known.budget[row]
            due = known.unused[row] >= known.pause[row] if known.unused[row] > 0 else on
            tries[row, at] = alive[row] and part.able[row] and due and loss <= known.budget[row]
    found = []
    for row, (option, time, worth, trials) in enumerate(choices):
        tried = False
        for at, (first, _, least, times) in enumerate(trials):
            wanted = 2 * tries[:, at].sum() > len(live) if together else tries[row, at]
            if wanted and not first <= choices[row][0] < first + steps and not tried:
                option, time, tried = first + int(least), times[least], True
        found.append((option, time, worth if tried else 1.0, tried, weight[row]))
    return found


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_choices_by_definition(together, given):
    """Random gains and times, parts that cannot draft or are late, rows that are done, budgets."""
    rng, rows = np.random.default_rng(0), 4
    kinds = collections.Counter()
    for turn in range(60):
        made = []
        for name in ("lookup", "drafter"):
            rates = rng.random((rows, 1)) * rng.random()
            gains = np.stack([(rates ** np.arange(w)).sum(1) for w in WIDTHS], 1)
            known = Trials(
                rng.integers(0, 5, rows), rng.integers(1, 5, rows),
                (rng.random(rows) * rng.choice([0.2, 2.0, 20.0])).astype(np.float32),
                np.zeros(rows, np.float32),
            )  # fmt: skip
            late = rng.random(rows) * rng.choice([0.0, 3.0])
            made.append(
                Part(name, gains.astype(np.float32), rng.random(rows) < 0.8,
                     late.astype(np.float32), known)
            )  # fmt: skip
        seconds = np.sort(rng.random(5) * rng.choice([0.3, 1.5])) + 1
        seconds = np.array([1.0, *seconds[1:3], *seconds[3:]], np.float32) * np.float32(0.02)
        alive = rng.random(rows) < (0.8 if turn else 0.0)
        left = rng.integers(1, rng.choice([4, 60]), rows) if given else None
        found = choose(WIDTHS, seconds, made, alive, left, together)
        wanted = naive_choice(seconds.astype(float), made, alive, left, together)
        kinds.update((option, tried) for option, _, _, tried, _ in wanted)
        for row, expected in enumerate(wanted):
            got = [
                x[row] for x in (found.option, found.time, found.worth, found.tried, found.weight)
            ]
            np.testing.assert_allclose(
                got, expected, rtol=2e-4, atol=1e-6, err_msg=f"{turn}, {row}"
            )
    assert {(0, False), (1, False), (2, False), (4, False), (1, True), (3, True)} <= set(kinds)


def test_drafts_that_cost_too_much_are_trials_only():
    """Where the debt exceeds the policy's, what promises to pay is chosen as a trial or not at all;
    the debt grows by what drafts lose, shrinks by what they save and by a share of the time, and
    trials have no part in it."""
    seconds = np.array([1.0, 1.1, 1.3], np.float32)
    (made,) = parts([0.9])
    assert chosen(seconds, [made]).option[0] > 0 and not chosen(seconds, [made]).tried[0]
    debt = np.full(1, POLICY.most_debt + 0.1, np.float32)
    barred = dataclasses.replace(made.trials, debt=debt)
    assert chosen(seconds, [dataclasses.replace(made, trials=barred)]).tried[0]
    waits = dataclasses.replace(barred, unused=np.ones(1, int))
    assert chosen(seconds, [dataclasses.replace(made, trials=waits)]).option[0] == 0
    one, yes, no = np.ones(1, np.float32), np.array([True]), np.array([False])

    def after(saved, tried):
        known = dataclasses.replace(made.trials, debt=2 * one)
        return float(known.after(one, saved * one, yes, tried, no, no).debt[0])

    share = POLICY.budget_share
    assert after(-3.0, no) == pytest.approx(5 - share)
    assert after(1.5, no) == pytest.approx(0.5 - share)
    assert after(9.0, no) == 0
    assert after(-3.0, yes) == after(3.0, yes) == pytest.approx(2 - share)


def test_when_a_trial_is_due():
    """After its pause, or at once where it goes on, if its loss is within the budget."""
    begun = Trials.start(np.full(2, 3), np.full(2, 1.0))
    assert begun.unused.tolist() == [0, 0] and begun.pause.tolist() == [3, 3]
    plain = np.array([True, False])
    assert begun.due(np.full(2, 1 / 16), plain).tolist() == [True, False]
    assert begun.due(np.full(2, 1 / 15), plain).tolist() == [False, False]
    for unused, due in ((2, False), (3, True), (4, True)):
        rested = dataclasses.replace(begun, unused=np.full(2, unused))
        assert rested.due(np.array([1.0, 1.001]), plain).tolist() == [due, False]
