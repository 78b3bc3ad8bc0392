"""`num_drafts` of `generate`, Medusa heads as a part of a proposer, and how often a command
decodes."""

import json
import math
import pathlib
import sys
import time

import counted
import jax
import language_models
import numpy as np
import pytest
import table_pair
from preparing import prepared

import specjax
from specjax.cli import main
from specjax.generation.run import decode
from specjax.generation.warmup import WARM_STEPS, place, warm_up

pytestmark = pytest.mark.xdist_group("calls")  # a share takes all of them, or none

PROMPTS = [[5, 6], [7], [5, 6, 7]]
TINY = pathlib.Path(__file__).parents[2] / "checkpoints" / "tiny"
NEW = 30


@pytest.fixture(scope="module")
def target():
    return language_models.target()


@pytest.fixture(scope="module")
def draft():
    return language_models.draft()


# --- num_drafts: at most so deep ------------------------------------------------------------------


@pytest.mark.parametrize("num_drafts", [None, 0, 1, 9, [0, 1, 2]])
def test_num_drafts_bounds_any_proposer(target, num_drafts):
    """A chain of two perfect drafts is cut to the given number, and the text is the same."""
    plain = specjax.generate(target, PROMPTS, proposer="none", max_new_tokens=NEW)
    chain = specjax.DraftModel(target.model, target.model.vocab_size, 2)
    out = specjax.generate(
        target, PROMPTS, draft=target, proposer=chain, num_drafts=num_drafts, max_new_tokens=NEW
    )
    assert out.tokens == plain.tokens
    depths = (
        num_drafts
        if isinstance(num_drafts, list)
        else [2 if num_drafts is None else min(num_drafts, 2)] * 3
    )
    passes = sum(
        math.ceil(len(row) / (depth + 1)) for row, depth in zip(out.tokens, depths, strict=True)
    )
    assert out.stats.target_passes == passes


def test_0_is_plain_decoding(target, draft):
    """The draft model is not read, so its context does not matter, and no draft is tested."""
    proposer = specjax.DraftTree(draft.model, target.model.vocab_size, (2, 1))
    for how in (
        {"draft": draft},
        {"draft": draft, "proposer": proposer},
        {"proposer": specjax.NGram()},
    ):
        call = prepared(target, PROMPTS, num_drafts=0, **how)
        assert call.decoder.proposer == specjax.NoProposer()
        assert place(call).params.proposer is None
    out = specjax.generate(target, [[5] * 250], draft=draft, num_drafts=0, max_new_tokens=10)
    assert out.stats.acceptance_rate is None
    plain = specjax.generate(target, [[5] * 250], proposer="none", max_new_tokens=10)
    assert out.tokens == plain.tokens


def test_a_draft_alone_drafts_as_deep_as_it_is_told(target, draft):
    """By default at most eight; of several numbers the greatest counts, and at least one."""
    for num_drafts, depth in ((None, 8), (2, 2), ([0, 3, 1], 3), ([0, 0, 0], 1), (200, 200)):
        call = prepared(target, PROMPTS, draft=draft, num_drafts=num_drafts)
        assert call.decoder.proposer.max_depth == depth
        assert call.decoder.capacity >= depth + 1


# --- heads as a part of a proposer ----------------------------------------------------------------


@pytest.mark.parametrize("order", ["lookup first", "heads first"])
def test_first_of_takes_heads(target, order):
    """No token changes, and the heads draft where the other part does not."""
    adapter = language_models.heads(target)
    parts = [specjax.NGram(adapter.proposer.max_depth), adapter]
    drafter = specjax.first_of(*(parts if order == "lookup first" else parts[::-1]))
    prompts = ["the cat the cat", "on", "a hat"]
    out = specjax.generate(target, prompts, drafter=drafter, max_new_tokens=NEW)
    plain = specjax.generate(target, prompts, proposer="none", max_new_tokens=NEW)
    assert out.tokens == plain.tokens
    lookup = specjax.generate(target, prompts, proposer=parts[0], max_new_tokens=NEW)
    assert out.stats.tested > lookup.stats.tested


def test_first_of_takes_a_bank_beside_a_draft(target, draft):
    """Each prompt has its own adapter or none; without one, only the other part drafts."""
    bank = specjax.MedusaBank.create(
        {name: language_models.heads(target, seed) for seed, name in enumerate("ab")}
    )
    chain = specjax.make_drafter(target, draft, num_drafts=bank.proposer.max_depth)
    prompts, options = ["the cat the cat"] * 3, {"max_new_tokens": NEW}
    drafter = specjax.first_of(bank, chain)
    out = specjax.generate(target, prompts, drafter=drafter, adapter=["a", "b", None], **options)
    plain = specjax.generate(target, prompts, proposer="none", max_new_tokens=NEW)
    assert out.tokens == plain.tokens
    alone = specjax.generate(target, prompts, drafter=drafter, adapter=[None] * 3, **options)
    assert (
        alone.stats.accepted
        == specjax.generate(target, prompts, drafter=chain, **options).stats.accepted
    )
    for adapter, words in ((None, "several adapters"), ("c", "no adapter 'c'"), (5, "adapter=5")):
        with pytest.raises(ValueError, match=words):
            specjax.generate(target, prompts, drafter=drafter, adapter=adapter, **options)


# --- how often a command decodes ------------------------------------------------------------------


@pytest.fixture
def passes(monkeypatch):
    """A list of the target's passes in all decoding so far, row by row; tests read and clear it."""
    counts, run = [], specjax.Decoder.run

    def counting(self, params, state, *steps):
        before = np.asarray(state.stats.target_passes).copy()
        state = run(self, params, state, *steps)
        counts.extend((np.asarray(state.stats.target_passes) - before).tolist())
        return state

    monkeypatch.setattr(specjax.Decoder, "run", counting)
    return counts


@pytest.mark.parametrize("form", [["--json"], []], ids=["json", "stream"])
@pytest.mark.parametrize("stop", [[], ["--stop", "zzz"]], ids=["", "stop"])
def test_a_command_decodes_once(capsys, monkeypatch, passes, form, stop):
    """It runs a few steps to compile and then decodes once; a comparison adds the same for plain
    decoding."""
    table_pair.stand_in(monkeypatch, TINY)
    pair = ["--target", str(TINY / "target"), "--draft", str(TINY / "draft")]
    drafts = ["--proposer", "draft", "--num-drafts", "2", "--max-new-tokens", "24"]
    arguments = ["generate", "def main(", *pair, *drafts, *form, *stop]
    out = specjax.generate(
        specjax.load(TINY / "target"),
        "def main(",
        draft=specjax.load(TINY / "draft"),
        proposer="draft",
        num_drafts=2,
        max_new_tokens=24,
    )
    needed = out.stats.target_passes
    warm = min(needed, WARM_STEPS)
    for extra, wanted in (
        (["--no-compare"], needed + warm),
        ([], needed + warm + 24 + min(24, WARM_STEPS)),
    ):
        passes.clear()
        sys.modules["specjax.generation.warmup"]._compiled.clear()  # as in a process of its own
        main([*arguments, *extra])
        assert sum(passes) == wanted
        printed = capsys.readouterr().out
        assert (json.loads(printed)["text"][0] if form else printed).find(out.text[0]) >= 0


@pytest.mark.parametrize(
    ("stream", "stop", "proposer"), [(True, (), specjax.NGram()), (False, "zzz", "none")]
)
def test_what_is_timed_compiles_nothing(target, stream, stop, proposer):
    """After `warm_up`, which runs a few steps, the first decoding compiles nothing."""
    jax.clear_caches()
    call = prepared(
        target,
        ["the cat", "on"],
        proposer=proposer,
        stop=stop,
        stream=stream,
        logprobs=1,
    )
    warm_up(call)
    before = counted.compilations()
    out = decode(call)
    if stream:
        list(out)
        out = out.output
    assert counted.compilations() == before
    assert out.stats.tokens == sum(map(len, out.tokens)) > 20


def test_a_reader_who_takes_time_is_not_timed(target, monkeypatch):
    """The time that the caller spends between two pieces is not counted as decoding."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    how = {"proposer": "none", "max_new_tokens": 40}
    stream = specjax.generate(target, "the cat", stream=True, **how)
    for _ in stream:
        clock[0] += 100.0
    assert stream.output.stats.seconds == 0.0
