"""Distillation: the sources of its text, the tokens it learns from, and that acceptance rises."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil

import folders
import jax
import numpy as np
import pytest
import trained
from toys import TRANSFORMERS as toys
from trained import metrics

from specjax import LanguageModel, load
from specjax.models.transformer import head_matrix
from specjax.text import vocabulary_digest
from specjax.training import online
from specjax.training.corpus import Tokens
from specjax.training.jobs import distill
from specjax.training.jobs.distill import Distill, DistillOptions
from specjax.training.material import Material
from specjax.training.optimizer import gradient
from specjax.training.sources import share_of_target
from specjax.training.student import make_model
from specjax.training.written import Written

LENGTH = 15
SMALL = {
    "target": "",
    "data": (),
    "sequence_length": LENGTH,
    "sampled_prompt": 4,
    "num_drafts": 3,
    "batch_size": 4,
}
TOKENS = np.random.default_rng(0).integers(1, toys.VOCAB, (8, LENGTH + 1), dtype=np.int32)
DRAWN = (np.arange(LENGTH) >= 3) & (np.arange(LENGTH) < np.array([[15], [12], [9], [6]] * 2))


def job(eos=(), **changes):
    """The toy target and its truncated copy as draft, on eight sequences, some of which end
    early."""
    options = DistillOptions(**{**SMALL, "sampled_fraction": 1.0, **changes})
    written = Written(TOKENS, DRAWN.astype(np.float32), np.full(8, LENGTH, np.int32))
    target = LanguageModel(toys.model(), toys.weights(), None, eos, "toy")
    return Distill(options, target, Material(None, written, written, {}), toys.model(num_layers=1))


def probabilities(net=None, arrays=None, heat=1.0):
    return np.asarray(
        jax.nn.softmax(toys.plain_logits(TOKENS, net, arrays)[:, :-1] / heat), np.float64
    )


def batch_of(everything=slice(None), **changes):
    rows = len(TOKENS[everything])
    batch = {"tokens": TOKENS[everything], "drawn": DRAWN[everything].astype(np.float32),
             "number": np.arange(rows, dtype=np.int32), "own": np.zeros(rows, bool),
             "limit": np.full(rows, LENGTH, np.int32),
             "share": np.ones(rows, np.float32)}  # fmt: skip
    return {**batch, **changes}


@pytest.mark.parametrize("eos", [(), (int(TOKENS[0, 6]), int(TOKENS[3, 2]))])
def test_the_accepted_length_loss_is_one_minus_its_share_of_the_drafts(eos):
    """Computed from both models' probabilities; while annealing it begins as forward KL. Nothing
    is accepted behind EOS, even if another document follows it, and chains cut by the end of the
    window do not count."""
    p, q = probabilities(), probabilities(toys.model(num_layers=1), toys.truncated())
    ratio = np.minimum(1, np.take_along_axis(q / p, TOKENS[:, 1:, None], 2)[..., 0])
    ratio = np.where(np.isin(TOKENS[:, 1:], eos), 0, ratio) * DRAWN
    alpha, kl = np.minimum(p, q).sum(2) * DRAWN, (p * np.log(p / q)).sum(2)
    lengths, first, limit = [], [], np.array([15, 15, 9, 15] * 2, np.int32)
    for row in range(8):
        for t in range(limit[row] - 2):
            if DRAWN[row, t]:
                r, a = ratio[row, t:], alpha[row, t:]
                lengths.append(a[0] + r[0] * a[1] + r[0] * r[1] * a[2])
                first.append(kl[row, t])
    loss = jax.jit(job(eos, loss="accepted-length", anneal_steps=2).loss)
    for share in (0.0, 0.5, 1.0):
        batch = batch_of(share=np.full(8, share, np.float32), limit=limit)
        value, others = loss(toys.truncated(), toys.weights(), batch)
        wanted = share * (1 - np.mean(lengths) / 3) + (1 - share) * np.mean(first)
        assert float(value) == pytest.approx(wanted, rel=0.03)
        assert float(others["weight"]) == len(lengths)
        assert float(others["expected_accepted_length"]) == pytest.approx(
            np.mean(lengths), rel=0.03
        )


def test_answers_shorter_than_the_drafts_are_learned():
    """An answer of two tokens counts like any other, even if three tokens are drafted."""
    drawn = np.zeros((8, LENGTH), np.float32)
    drawn[:, 4:6] = 1
    loss = jax.jit(jax.value_and_grad(job(loss="accepted-length").loss, has_aux=True))
    (value, others), grads = loss(toys.truncated(), toys.weights(), batch_of(drawn=drawn))
    assert float(others["weight"]) == 16 and 1 / 3 < float(value) < 1
    assert max(float(abs(leaf).max()) for leaf in jax.tree.leaves(grads)) > 1e-4


def test_parts_of_a_batch_weigh_what_they_hold():
    """Sequences that end early make unequal parts; accumulated, they equal the batch."""
    made = job(loss="accepted-length")
    read = jax.jit(gradient, static_argnums=(0, 1))
    whole, cut = (
        read(made.loss, parts, toys.truncated(), toys.weights(), batch_of()) for parts in (1, 4)
    )
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_nothing_is_learned_behind_an_end():
    """Padding may hold anything."""
    loss = jax.jit(job().loss)
    ends = np.array([15, 12, 9, 6] * 2)
    other = np.where(np.arange(LENGTH + 1) > ends[:, None], 7, TOKENS)
    assert (other != TOKENS).any()
    values = [
        float(loss(toys.truncated(), toys.weights(), batch_of(tokens=t))[0])
        for t in (TOKENS, other)
    ]
    assert values[0] == values[1]


def test_the_draft_goes_on_in_rows_of_its_own():
    """At temperature 0 each token is the draft's most probable one; other rows and prompts stay."""
    made = job(draft_fraction=0.5, sampled_fraction=0.5, temperature=0.0)
    own = np.arange(8) < 4
    continued = np.asarray(made._continue(toys.truncated(), batch_of(own=own)))
    assert (continued[4:] == TOKENS[4:]).all() and (continued[:, :4] == TOKENS[:, :4]).all()
    best = toys.plain_logits(continued, toys.model(num_layers=1), toys.truncated()).argmax(-1)
    assert (continued[:4, 4:] == best[:4, 3:-1]).all()


def test_learning_inside_speculation():
    """At every root and draft, the target's distribution is that of a plain pass over the same
    tokens, and the draft's is the one that it drafted from. So drafts behind a rejected one are
    learned on the draft's own text."""
    steps, case, gamma = 3, "draft 3", 3
    decoder, arrays = toys.decoder(case, "rejection", eos=()), toys.params(case)
    limit = np.full(toys.ROWS, toys.CAPACITY, np.int32)

    def start():
        return toys.prefill(decoder, arrays, temperature=1.0, limit=limit)

    rolled = jax.jit(online.roll_out, static_argnums=(0, 3))(decoder, arrays, start(), steps)
    draft = arrays.proposer
    hidden = jax.jit(online.read_branches, static_argnums=0)(toys.model(), draft, rolled)
    logits = jax.nn.log_softmax(hidden @ head_matrix(draft))
    state, step, rejected = start(), jax.jit(decoder.step), 0
    for number in range(steps):
        root = np.asarray(state.length) - 1
        text = np.asarray(state.tokens)
        state, info = step(arrays, state)
        np.testing.assert_array_equal(rolled.root[:, number], root)
        np.testing.assert_array_equal(rolled.drafts[:, number], info.proposal.tokens[:, 1:])
        wanted = jax.nn.log_softmax(info.proposal.logits)[:, :gamma]
        np.testing.assert_allclose(logits[:, number, :gamma], wanted, rtol=1e-3, atol=1e-4)
        for row in range(toys.ROWS):
            chain = [*text[row, : root[row] + 1], *np.asarray(rolled.drafts[row, number])]
            plain = toys.plain_logits(np.pad(chain, (0, toys.CAPACITY - len(chain)))[None])[0]
            at = root[row] + np.arange(gamma + 1)
            np.testing.assert_allclose(rolled.logits[row, number], plain[at], rtol=1e-3, atol=1e-4)
        rejected += int((np.asarray(info.num_accepted) < gamma).sum())
    assert rejected > 0
    np.testing.assert_array_equal(rolled.emitted, state.length - toys.LENGTHS)


def test_where_sequences_come_from(tmp_path):
    """Mixed per sequence, every batch has all parts; mixed per batch, each has one; inside
    speculation all are windows of text; only the step decides."""
    np.arange(4000, dtype=np.uint16).tofile(tmp_path / "ids")
    text, made = Tokens(tmp_path / "ids"), job(sampled_fraction=0.5, draft_fraction=0.25)
    made = dataclasses.replace(made, material=dataclasses.replace(made.material, text=text))

    def counts(made, step):
        batch = made.batch(step)
        answers = batch["drawn"].any(1)
        assert not (answers & batch["own"]).any() and not made.options.online & answers.any()
        assert batch["number"].tolist() == [4 * step + n for n in range(4)]
        return [int(x.sum()) for x in (~answers & ~batch["own"], answers, batch["own"])]

    assert [counts(made, step) for step in (7, 3, 7)] == [[1, 2, 1]] * 3
    whole = dataclasses.replace(made, options=dataclasses.replace(made.options, mix="batch"))
    found = np.array([counts(whole, step) for step in range(40)])
    assert (found.max(1) == 4).all() and found.sum(0).tolist() == [40, 80, 40]
    online = job(online=True, sampled_fraction=0.5, draft_fraction=0.25)
    assert counts(dataclasses.replace(online, material=made.material), 3) == [4, 0, 0]


def test_packed_answers_beside_text(tmp_path):
    """Rows of text then have an array of starts, too, in which none begins."""
    np.arange(4000, dtype=np.uint16).tofile(tmp_path / "ids")
    made = job(sampled_fraction=0.5)
    written = made.material.written
    assert written is not None
    data = dataclasses.replace(
        made.material, text=Tokens(tmp_path / "ids"), written=written.packed()
    )
    made = dataclasses.replace(made, material=data)
    batch = made.batch(0)
    answers = batch["drawn"].any(1)
    assert batch["starts"].any(1).tolist() == answers.tolist() and answers.sum() == 2


def test_the_share_of_the_target_is_inferred(capsys):
    """It is 1 without text and for the loss that needs it; a share of 0 beside data is said."""
    written = Written(TOKENS, DRAWN.astype(np.float32), np.full(8, LENGTH, np.int32))

    def share(text, data, **changes):
        options = DistillOptions(**{**SMALL, **changes})
        material = Material(text, data, written, {})
        return share_of_target(
            options.sampled_fraction, options.share_beside_text(data is not None), material
        )

    text = Tokens(pathlib.Path("none"))
    assert share(None, written) == 1
    assert share(text, None) == share(text, written) == 0.5
    assert share(text, written, draft_fraction=0.75) == 0.25
    assert share(text, None, loss="accepted-length") == 1
    assert share(text, None, sampled_fraction=0.0) == 0 and not capsys.readouterr().out
    assert share(text, written, sampled_fraction=0.0) == 0
    assert "leaves the 8 sequences with answers in --data unused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "reverse-kl", "top_k": 5}, "reverse-kl is infinite"),
        ({"loss": "reverse-kl", "temperature": 0.0}, "reverse-kl is infinite"),
        ({"loss": "accepted-length", "sampled_fraction": 0.5}, "pass --sampled-fraction 1"),
        ({"loss": "accepted-length", "sampled_fraction": 1.0, "online": True}, "neither --online"),
        ({"sampled_fraction": 0.7, "draft_fraction": 0.4}, "add up to more than 1"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"sampled_prompt": 15}, "shorter than a sequence"),
        ({"eval_prompts": 2, "eval_tokens": 12}, "more than --sequence-length 15"),
        (
            {"online": True, "sampled_prompt": 13},
            "no room for --num-drafts 3 after --sampled-prompt 13",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(changes, message):
    """The error names the option and the cure."""
    with pytest.raises(ValueError, match=message):
        DistillOptions(**{**SMALL, **changes})


def run(out, *more, data=None):
    distill.main([
        "--target", str(trained.target()), "--data", str(data or trained.text()), "--out", str(out),
        "--sampled-sequences", "8", "--sampled-batch", "4", "--sampled-prompt", "8",
        "--learning-rate", "0.01", "--warmup-steps", "2", "--log-every", "1", *trained.DRAFT_SIZES,
        *more,
    ])  # fmt: skip
    return metrics(out)


def test_sequences_longer_than_the_context_are_refused(tmp_path):
    """The error names the length and the target's maximum."""
    with pytest.raises(ValueError, match="--sequence-length is 33; the target reads at most 32"):
        run(tmp_path, "--sequence-length", "33")


def test_a_draft_of_other_tokens_to_go_on_from_is_refused(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"--initial .*tiny/draft has other tokens .* than --target .* \(300, in one",
    ):
        run(tmp_path, "--initial", str(trained.SOURCE / "checkpoints" / "tiny" / "draft"))


def test_rows_that_fill_up_a_mesh_do_not_count(monkeypatch):
    """What is held out is the same for any number of devices."""
    wanted = job(eval_batches=1).evaluate(toys.truncated())
    monkeypatch.setattr("specjax.training.jobs.distill.row_parts", lambda mesh: 3)
    report = job(eval_batches=1).evaluate(toys.truncated())
    assert report == pytest.approx(wanted, rel=1e-5) and report["held_out_kl"] > 0


def test_a_draft_ends_texts_as_its_target_does(tmp_path):
    """The draft gets all EOS ids of the target, whatever its tokenizer calls them."""
    folder = shutil.copytree(folders.target(), tmp_path / "target")
    folders.edit(folder, "generation_config.json", eos_token_id=[0, 7])
    words = folder / "tokenizer.json"
    words.write_text(words.read_text().replace(folders.END, "</s>"))
    target = load(folder)
    draft = make_model(DistillOptions(**SMALL), target.model.vocab_size)
    whole = np.full(len(TOKENS), DRAWN.shape[1], np.int32)
    written = Written(TOKENS, DRAWN.astype(np.float32), whole)
    options = DistillOptions(**{**SMALL, "target": str(folder)})
    made = Distill(options, target, Material(None, written, written, {}), draft)
    made.export(made.init(), tmp_path / "draft")
    loaded = load(tmp_path / "draft")
    assert loaded.eos == target.eos == (0, 7)
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["eos_token_id"] == [0, 7]
    assert vocabulary_digest(loaded.tokenizer) == vocabulary_digest(target.tokenizer)


def test_distillation_raises_the_measured_tau(tmp_path):
    """tau, measured by the decoder, rises beyond the confidence intervals of both."""
    measured = (
        "--eval-prompts",
        "24",
        "--eval-tokens",
        "20",
        "--eval-batches",
        "1",
        "--eval-every",
        "6",
    )
    measurements = [line for line in run(tmp_path, "--steps", "60", *measured) if "tau" in line]
    before, after = measurements[0], measurements[-1]
    assert (
        before["tau_low"] <= before["tau"] <= before["tau_high"] < after["tau_low"] <= after["tau"]
    )
    assert (tmp_path / "best" / "model.safetensors").exists()


MODES = {
    "accepted length": (
        "--loss", "accepted-length", "--anneal-steps", "8", "--sampled-fraction", "1",
        "--temperature", "0.8", "--top-p", "0.95",
    ),
    "in speculation": (
        "--online", "--loss", "total-variation", "--anneal-steps", "10", "--num-drafts", "3"
    ),
    "all parts": (
        "--draft-fraction", "0.25", "--isolate-documents", "--accumulate", "2", "--ema", "0.5",
        "--remat", "--loss", "jensen-shannon", "--mix", "batch", "--schedule", "cosine",
    ),
}  # fmt: skip


FLAT = ("--loss", "total-variation", "--sampled-fraction", "0")


@pytest.mark.parametrize("mode", [MODES["all parts"], FLAT, ("--sampled-fraction", "0.1")], ids=str)
def test_a_resumed_distillation_is_uninterrupted(tmp_path, mode):
    """The draft's text, the part of each row and the annealed loss depend only on the step and
    the parameters."""
    arguments = (*mode, "--steps", "6", "--eval-every", "2", "--eval-batches", "1")
    whole = run(tmp_path / "whole", *arguments)
    run(tmp_path / "cut", *arguments, "--stop-at", "3")
    assert run(tmp_path / "cut", *arguments) == whole
    models = [
        (tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "cut")
    ]
    assert models[0] == models[1]


def test_a_loss_that_is_flat_from_nothing_begins_as_forward_kl(tmp_path):
    """It then anneals to its own loss, unless an option says otherwise."""
    steps = ("--steps", "4", "--eval-batches", "1", "--sampled-fraction", "0")
    losses = {
        name: [line["loss"] for line in run(tmp_path / name, *steps, *more) if "loss" in line]
        for name, more in {
            "kl": (), "flat": FLAT, "at once": (*FLAT, "--anneal-steps", "0"),
        }.items()
    }  # fmt: skip
    assert losses["flat"][0] == losses["kl"][0] > 1
    assert losses["at once"][0] < 1 and losses["flat"][3] < 1, "total variation is at most 1"


def test_which_runs_are_annealed(tmp_path):
    """A run from scratch with a loss that is flat there is annealed; a resumed run continues as
    it began."""

    def steps(**changes):
        common = {**SMALL, "out": str(tmp_path), "steps": 40}
        return distill.annealing(DistillOptions(**{**common, **changes}))

    accepted = {"loss": "accepted-length", "sampled_fraction": 1.0}
    assert steps(loss="total-variation") == steps(**accepted) == 32
    assert steps() == steps(loss="jensen-shannon") == 0
    assert steps(loss="total-variation", initial="folder") == steps(**accepted, anneal_steps=0) == 0
    assert steps(anneal_steps=7) == steps(loss="total-variation", anneal_steps=7) == 7
    (tmp_path / "run.json").write_text(
        '{"options": {"anneal_steps": 3}, "inputs": {}, "shapes": {}}'
    )
    assert steps(loss="total-variation") == 32, "nothing was saved yet"
    (tmp_path / "state" / "10").mkdir(parents=True)
    assert steps(loss="total-variation") == 3


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_learns(tmp_path, mode):
    """A whole run from the command line raises the acceptance on held-out text."""
    steps = ("--steps", "24", "--eval-every", "1", "--eval-batches", "1")
    lines = run(tmp_path / "run", *MODES[mode], *steps)
    alphas = [line["held_out_alpha"] for line in lines if "held_out_alpha" in line]
    assert np.mean(alphas[-3:]) > np.mean(alphas[:3]) + 0.02
    assert all(np.isfinite(line["loss"]) for line in lines if "loss" in line)
