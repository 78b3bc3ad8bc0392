"""Drawn options of training: schedules, shares of the data, and ways to write the options."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import tempfile
import types
import typing

import grain
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from properties import law

from specjax.options.command import parse
from specjax.options.fields import flag
from specjax.training.jobs.distill import DistillOptions
from specjax.training.loop import LoopOptions
from specjax.training.optimizer import SCHEDULES, OptimizerOptions, make_schedule, phases
from specjax.training.ordering import batches

fractions = st.sampled_from([0.0, 1.0]) | st.floats(0, 1)
MOST = 400  # steps


def test_a_learning_rate_stays_below_its_peak_and_never_jumps():
    """From one step to the next it changes by no more than its phase asks for, and after the run
    it is 0."""

    @law(200)
    @given(
        steps=st.integers(1, MOST),
        warmup_steps=st.integers(0, MOST),
        warmup_fraction=fractions,
        decay_fraction=fractions,
        learning_rate=st.floats(1e-6, 1),
        schedule=st.sampled_from(SCHEDULES),
    )
    def check(**drawn):
        options = OptimizerOptions(**drawn)
        warmup, decay = phases(options)
        assert 0 <= warmup and 1 <= decay and warmup + decay <= options.steps
        rates = np.asarray(make_schedule(options)(jnp.arange(MOST + 2))) / options.learning_rate
        assert rates.min() >= 0
        assert rates.max() <= 1 + 1e-5
        assert rates[warmup] == pytest.approx(1, abs=1e-5), "the peak is reached"
        np.testing.assert_allclose(rates[options.steps :], 0, atol=1e-6)
        fall = decay if options.schedule == "wsd" else (options.steps - warmup) * 2 / math.pi
        rises, falls = np.diff(rates).max(), -np.diff(rates).min()
        assert rises <= (1 / warmup if warmup else 0) + 1e-5
        assert falls <= 1 / fall + 1e-5

    check()


def of_sources(rows, sampled, draft, whole=False):
    """Batches of rows that say which source they come from, and their number there."""

    def source(answers):
        def row(number):
            return {"row": number, "answers": answers, "limit": np.int32(0)}

        return grain.MapDataset.range(10**9).map(row)

    return batches(source(False), source(True), rows, sampled, draft, whole)


def test_every_source_gets_its_share():
    """Each source is read in order, each row once, and after any number of steps none is more than
    a sequence away from its share, however small that is."""
    twentieths = st.integers(0, 20).map(lambda n: n / 20)

    @law(200)
    @given(
        rows=st.integers(1, 9),
        sampled=fractions | twentieths,
        draft=fractions | twentieths,
        steps=st.integers(1, 200),
    )
    def check(rows, sampled, draft, steps):
        draft = min(draft, 1 - sampled)
        made, read = of_sources(rows, sampled, draft), [0, 0, 0]
        for step in range(steps):
            batch = made[step]
            for answers in (False, True):
                mine = batch["answers"] == answers
                before = read[1] if answers else read[0] + read[2]
                assert batch["row"][mine].tolist() == list(range(before, before + mine.sum()))
                read[1 if answers else 0] += int((mine & ~batch["own"]).sum())
            read[2] += int(batch["own"].sum())
            assert not (batch["own"] & batch["answers"]).any()
            assert batch["number"].tolist() == list(range(step * rows, (step + 1) * rows))
        shares = (1 - sampled - draft, sampled, draft)
        for count, share in zip(read, shares, strict=True):
            wanted = steps * rows * share
            assert abs(count - wanted) <= 1 + 1e-6
            assert count > 0 or wanted <= 1 + 1e-6, "it does not starve"
            assert count == 0 or share > 0

    check()


@law(30)
@given(sampled=st.integers(0, 4), draft=st.integers(0, 4), rows=st.integers(1, 9))
def test_whole_batches_come_from_one_source(sampled, draft, rows):
    """After any number of steps each source has had its share of the batches, to within one."""
    shares = np.array([1, sampled, draft]) / (1 + sampled + draft)
    made, read = of_sources(rows, *shares[1:], whole=True), np.zeros(3)
    for step in range(40):
        batch = made[step]
        kinds = np.where(batch["answers"], 1, np.where(batch["own"], 2, 0))
        assert len(kinds) == rows and (kinds == kinds[0]).all()
        assert (np.diff(batch["row"]) == 1).all() and batch["row"][0] % rows == 0
        read[kinds[0]] += 1
        assert (abs(read - shares * (step + 1)) <= 1 + 1e-9).all()


KINDS = {
    int: st.integers(1, 10**6),
    float: st.floats(0, 1, exclude_max=True),
    bool: st.booleans(),
    str: st.sampled_from(["-x", "--steps", "-1e-5", "a b", "1e3", "yes", "null", "#", "'\"", ": "])
    | st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=8),
}


def of_field(hint, field):
    """Values of an option."""
    choices = field.metadata.get("choices")
    if typing.get_origin(hint) is tuple:
        kind = st.sampled_from(choices) if choices else KINDS[typing.get_args(hint)[0]]
        # A shell cannot tell a value that begins with "-" from an option.
        several = kind.filter(lambda value: not str(value).startswith("-"))
        return st.lists(several, min_size=1, max_size=3).map(tuple)
    if choices:
        return st.sampled_from(choices)
    kinds = [k for k in typing.get_args(hint) or (hint,) if k is not types.NoneType]
    return KINDS[kinds[0]]


@st.composite
def options_of(draw, cls):
    """Options with some fields drawn, as far as the class allows them."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    required = {n for n, field in fields.items() if field.default is dataclasses.MISSING}
    names = required | set(draw(st.lists(st.sampled_from(sorted(fields)), unique=True, max_size=6)))
    # They would join other processes, and ask for devices.
    names -= {"coordinator", "num_processes", "process_id", "mesh"}
    values = {name: draw(of_field(hints[name], fields[name])) for name in sorted(names)}
    try:
        return cls(**values)
    except ValueError:
        assume(False)


def arguments(values):
    """A command line, as a shell would pass it."""
    line = []
    for name, value in values.items():
        if isinstance(value, bool):
            line.append(flag(name) if value else "--no-" + flag(name)[2:])
        elif isinstance(value, tuple):
            line += [flag(name), *map(str, value)]
        else:
            line.append(f"{flag(name)}={value}")
    return line


@pytest.mark.parametrize("cls", [LoopOptions, DistillOptions])
def test_options_come_back_from_every_way_to_write_them(cls):
    """A command line, a YAML file and a JSON file give equal options; so does a file that the
    command line overrides."""
    different = 0

    @law(30)
    @given(options_of(cls))
    def check(options):
        nonlocal different
        values = {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in dataclasses.fields(cls)
            if (value := getattr(options, field.name)) != field.default
        }
        line = arguments({n: getattr(options, n) for n in values})
        assert parse(cls, line) == options
        for suffix, text in (
            (".yaml", yaml.safe_dump(values)), (".json", json.dumps(values)),
        ):  # fmt: skip
            with tempfile.TemporaryDirectory() as folder:
                path = pathlib.Path(folder) / f"options{suffix}"
                path.write_text(text)
                assert parse(cls, ["--config", str(path)]) == options
                line = arguments({"out": "elsewhere", "seed": 7})
                changed = dataclasses.replace(options, out="elsewhere", seed=7)
                assert parse(cls, ["--config", str(path), *line]) == changed
        different += len(values)

    check()
    assert different > 60
