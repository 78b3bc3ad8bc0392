"""What a drafter learns from is what it will read when it drafts: the view of training, against
the state of a decoder, position by position; and the job as a user runs it."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trained
from jax import Array
from started import started
from toys import TRANSFORMERS as toys
from trained import metrics

import specjax
from specjax.contract import Context, Lookahead, Source
from specjax.decoding.decoder import Decoder
from specjax.methods import SharedParams
from specjax.methods.eagle3.learner import initial_eagle3
from specjax.models import dot_general, head_matrix
from specjax.rules import Match
from specjax.sampling import Sampling
from specjax.training import features
from specjax.training.drafters import KINDS, Learner, Lesson, draw_anchors, plan
from specjax.training.jobs import drafter
from specjax.training.online import row_keys
from specjax.types import Block, Params

VOCAB, LENGTH, DRAFTS, MASK = 13, 12, 3, 5


@dataclasses.dataclass(frozen=True)
class Sizes:
    num_drafts: int = DRAFTS
    num_layers: int | None = 2
    mlp_size: int | None = 24
    taps: tuple[int, ...] = (1, 2)
    own_head: bool | None = None
    draft_vocab_size: int = 0
    markov_rank: int = 6
    markov_head: str = "rnn"
    confidence: bool = True


CASES = {
    **{kind: (kind, Sizes()) for kind in KINDS},
    "mtp": ("mtp", Sizes(num_layers=None, mlp_size=None, taps=())),
    "eagle3, one layer": ("eagle3", Sizes(num_layers=1)),
    "dspark, gated": ("dspark", Sizes(markov_head="gated")),
    "dspark, vanilla, own head": ("dspark", Sizes(markov_head="vanilla", own_head=True)),
    "dspark, no correction": ("dspark", Sizes(markov_rank=0)),
}


@functools.cache
def target() -> tuple[Any, Any, np.ndarray]:
    """A toy target, its parameters, and texts [2, T + 1]."""
    net = toys.model(VOCAB, num_layers=2)
    params = net.init(jax.random.key(1))
    return net, params, np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH + 1))


def random_params(learner: Learner) -> SharedParams:
    """No parameter keeps an initial value that would hide a mistake, such as 0 or 1."""
    _, params, _ = target()
    own = jax.device_get(learner.init(jax.random.key(2)))
    if learner.own_head:
        own["head"] = {"kernel": head_matrix(params)}
    rng = np.random.default_rng(3)
    own = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32), own)
    names = ("embedding",) if learner.own_head else ("embedding", "head")
    return SharedParams(own, {name: params[name] for name in names})


@functools.cache
def read(taps: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The target's features [2, T, F] and last hidden states of the texts."""
    net, params, texts = target()
    positions = np.broadcast_to(np.arange(LENGTH), (2, LENGTH))
    out = jax.jit(functools.partial(net.apply, taps=taps))(params, texts[:, :-1], positions)
    return np.asarray(out.features), np.asarray(out.hidden)


def drafted(learner: Learner, params: SharedParams, anchor: Array) -> Array:
    """[2, D, V] what the source predicts along the text when the token at `anchor` is pending.

    The anchor is data, and the whole text is there as the padding of a prompt, so that all anchors
    share one program.
    """
    texts = jnp.asarray(target()[2])
    features, hidden = read(learner.source.taps)
    prompt = Block(
        texts[:, :-1], jnp.asarray(hidden), jnp.broadcast_to(anchor, (2,)), jnp.asarray(features)
    )
    source, pending = learner.source, texts[:, anchor]
    context = Context(pending, None, None, True, False, None)  # type: ignore[arg-type]
    if isinstance(source, Source):
        state = started(source, params, prompt, 32, Lookahead(DRAFTS, 1, True))
        _, reading, logits = source.begin(params, state, context)
        rows = [logits]
        for depth in range(1, DRAFTS):
            at = jnp.minimum(anchor + depth, LENGTH)
            reading, logits = source.extend(params, reading, texts[:, at])
            rows.append(logits)
        return jnp.stack(rows, axis=1)
    state = started(source, params, prompt, 32)
    marginals, _, reading = source.marginals(params, state, context)
    if not source.corrects:
        return marginals
    rows, memory = [], None
    for depth in range(DRAFTS):
        previous = texts[:, jnp.minimum(anchor + depth, LENGTH)][:, None]
        made = source.correct(params, reading, depth, previous, memory)
        memory = made.memory
        rows.append(made.logits[:, 0])
    return jnp.stack(rows, axis=1)


@pytest.mark.parametrize("name", CASES)
def test_training_reads_what_a_decoder_reads(name, monkeypatch):
    """At every anchor and depth the logits are those of the source in a decoder."""
    for module in ("eagle3", "block"):  # training rounds to bfloat16
        monkeypatch.setattr(f"specjax.methods.{module}.learner.mixed_dot_general", dot_general)
    kind, sizes = CASES[name]
    net, _, texts = target()
    learner = plan(kind, sizes, net.module.config, MASK)
    params = random_params(learner)
    features, _ = read(learner.source.taps)
    anchors = np.array([[1, 4, 5, 9], [2, 3, 8, 9]])
    lesson = Lesson(
        jnp.asarray(texts),
        jnp.ones((2, LENGTH)),
        jnp.asarray(features),
        jnp.asarray(anchors),
        jnp.ones(anchors.shape),
    )
    guesses = jax.jit(learner.guesses)(params, lesson)
    assert [guess.depth for guess in guesses] == list(range(DRAFTS))
    matrix = np.asarray(learner.head(params))
    draft = jax.jit(functools.partial(drafted, learner))
    by_anchor = functools.cache(lambda anchor: np.asarray(draft(params, jnp.int32(anchor))))
    compared = 0
    for guess in guesses:
        logits = np.asarray(guess.hidden) @ matrix
        for row in range(2):
            for column, at in enumerate(np.asarray(guess.at[row])):
                if not guess.weight[row, column]:
                    continue
                wanted = by_anchor(int(at) - guess.depth)[row, guess.depth]
                np.testing.assert_allclose(logits[row, column], wanted, rtol=0, atol=2e-4)
                compared += 1
    assert compared >= 2 * 4 * DRAFTS - 4


def test_anchors_are_learned_positions():
    """Each is drawn once, has a token before it, and its next token is learned; a row that has too
    few of them says so."""
    learned = jnp.array([[1, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0]])
    keys = jax.random.split(jax.random.key(0), 3)
    at, present = draw_anchors(keys, learned, 3)
    assert at[0].tolist() == [1, 3, 4]
    assert present.tolist() == [[1, 1, 1], *present.tolist()[1:]]
    assert at[1][present[1] > 0].tolist() == [5]
    assert present[2].sum() == 0
    every = jax.random.split(jax.random.key(1), 60)
    pairs = draw_anchors(every, jnp.ones((60, 6)), 2)[0]
    drawn = set(map(tuple, pairs.tolist()))
    assert len(drawn) == 10  # all pairs of 1 ... 5


SIZED = ["--num-layers", "1", "--mlp-size", "32", "--taps", "0", "1"]
"""The form of an MTP layer follows from its target."""

SMALL = ["--num-drafts", "3", "--markov-rank", "8",
         "--sequence-length", "32", "--batch-size", "4", "--eval-batches", "2",
         "--steps", "16", "--save-every", "8", "--eval-every", "16", "--log-every", "4",
         "--warmup-steps", "2", "--learning-rate", "0.01"]  # fmt: skip


LONGER = ["--steps", "32"]
"""An MTP layer of 16 steps drafts nothing right on some texts, and the text is of our own files."""


def train(kind: str, out: Any, *more: str) -> None:
    where = ["--target", str(trained.target()), "--data", str(trained.text()), "--out", str(out)]
    drafter.main(["--kind", kind, *where, *SMALL, *(SIZED if kind != "mtp" else LONGER), *more])


@functools.cache
def whole(kind: str) -> pathlib.Path:
    """The folder of a run without interruption."""
    folder = trained.ROOT / f"drafter-{kind}"
    train(kind, folder)
    return folder


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "eagle3" else pytest.mark.slow) for k in KINDS]
)
def test_an_interrupted_run_is_uninterrupted(kind, tmp_path):
    """It ends with the same bytes. By default one kind, since the loop knows no kind; `dflash` and
    `dspark` are interrupted below, with kept hidden states and inside speculation."""
    train(kind, tmp_path, "--stop-at", "8")
    train(kind, tmp_path)
    assert weights(tmp_path) == weights(whole(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_learns_and_its_folder_drafts(kind):
    """The loss falls, and the exported folder drafts for its target without changing a token."""
    lines = [line for line in metrics(whole(kind)) if "loss" in line]
    assert lines[-1]["loss"] < 0.95 * lines[0]["loss"]
    target = specjax.load(trained.target(), "float32")
    made = specjax.load_drafter(whole(kind) / "model", target)
    prompts = ["def f(", "import os\nimport "]
    plain = specjax.generate(target, prompts, max_new_tokens=16)
    for nodes in (None, 6):
        drafts = specjax.drafters.arrange(made, None if nodes else 2, nodes, 2)
        output = specjax.generate(target, prompts, drafter=drafts, max_new_tokens=16)
        assert output.tokens == plain.tokens
        assert output.stats.accepted > 0


def test_a_reduced_vocabulary_and_another_start(tmp_path, capsys):
    """The most frequent tokens of the data, and always the EOS; a finished drafter goes on, and one
    of another shape is refused."""
    small = ["--draft-vocab-size", "60", "--eval-prompts", "2", "--eval-tokens", "8",
             "--sampled-prompt", "8", "--sampled-fraction", "0.5", "--sampled-sequences", "8",
             "--loss", "adaptive"]  # fmt: skip
    train("eagle3", tmp_path / "one", *small)
    assert metrics(tmp_path / "one")[-1]["tau"] >= 1
    folder = tmp_path / "one" / "model"
    target = specjax.load(trained.target(), "float32")
    own = specjax.load_drafter(folder, target).params
    known = np.flatnonzero(np.asarray(own["to_draft"]) >= 0)
    assert len(known) == 60 and set(target.eos) <= set(known.tolist())
    assert own["head"]["kernel"].shape[1] == 60
    again = [*small, "--initial", str(folder), "--learning-rate", "0"]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        train("eagle3", tmp_path / "two", *again)
    assert "--learning-rate is 0" in capsys.readouterr().err
    train("eagle3", tmp_path / "two", *again[:-1], "1e-20")  # no float32 weight moves
    before, after = (
        specjax.load_drafter(tmp_path / run / "model", target).params for run in ("one", "two")
    )
    jax.tree.map(np.testing.assert_array_equal, before, after)
    with pytest.raises(ValueError, match="knows 60 tokens"):
        train("eagle3", tmp_path / "three", *small[2:], "--initial", str(folder))
    with pytest.raises(ValueError, match="mlp_size: 32 in the folder, 24 by the options"):
        train("eagle3", tmp_path / "four", *again[:-2], "--mlp-size", "24")
    with pytest.raises(ValueError, match="not a drafter of --kind dflash"):
        train("dflash", tmp_path / "five", "--initial", str(folder))


def test_a_narrower_head_goes_on(tmp_path):
    """Its layers keep their sizes, and the table that only it has learns, too."""
    target = specjax.load(trained.target(), "float32")
    made = specjax.load_drafter(whole("eagle3") / "model", target)
    layers = dataclasses.replace(
        made.source.network.layers, hidden_size=16, num_heads=2, num_kv_heads=1
    )
    network = dataclasses.replace(made.source.network, layers=layers)
    source = dataclasses.replace(made.source, network=network)
    drawn = jax.random.split(jax.random.key(0), 2)
    vocab = target.model.vocab_size
    own = {
        "network": initial_eagle3(source, drawn[0]),
        "embedding": 0.1 * jax.random.normal(drawn[1], (vocab, 16)),
        "head": {"kernel": jnp.zeros((16, vocab))},
    }
    narrow = dataclasses.replace(made, source=source, params=own, shares=())
    specjax.save_drafter(tmp_path / "narrow", narrow, target)
    train("eagle3", tmp_path / "run", "--initial", str(tmp_path / "narrow"))
    lines = [line for line in metrics(tmp_path / "run") if "loss" in line]
    assert lines[-1]["loss"] < 0.95 * lines[0]["loss"]
    after = specjax.load_drafter(tmp_path / "run" / "model", target)
    assert after.source.network.layers == layers and after.shares == ()
    assert float(jnp.abs(after.params["embedding"] - own["embedding"]).max()) > 1e-3


def weights(run: pathlib.Path) -> bytes:
    return next((run / "model").glob("*.safetensors")).read_bytes()


def test_hidden_states_are_read_once(tmp_path, capsys, monkeypatch):
    """Sequences that come again are read from disk.  An interrupted run, a damaged file and a
    smaller bound change no byte of the drafter."""
    written = ["--sampled-fraction", "1", "--sampled-sequences", "9", "--sampled-prompt", "8"]
    small = [*written, "--keep-features", "0.001"]
    reads: list[int] = []
    of = features.Features.of

    def counted(self: features.Features, tokens: np.ndarray) -> np.ndarray:
        inner = self._read
        self._read = lambda tokens: reads.append(1) or inner(tokens)
        try:
            return of(self, tokens)
        finally:
            self._read = inner

    monkeypatch.setattr(features.Features, "of", counted)
    train("dflash", tmp_path / "whole", *small)
    assert "0.00 MB a sequence" in capsys.readouterr().out
    # 9 sequences in batches of 4, 16 steps: the third batch has the last new ones.
    assert len(reads) == 3
    files = sorted((tmp_path / "whole" / "features").glob("*/*.safetensors"))
    assert len(files) == 9
    assert features.read_shard(files[0])["states"].shape == (32, 3 * 16)

    train("dflash", tmp_path / "parts", *small, "--stop-at", "8")
    kept = sorted((tmp_path / "parts" / "features").glob("*/*.safetensors"))
    kept[0].write_bytes(kept[0].read_bytes()[:-1] + b"?")
    kept[1].unlink()
    train("dflash", tmp_path / "parts", *small)
    assert "these hidden states are computed again" in capsys.readouterr().out
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")

    reads.clear()
    some = [*written, "--keep-features", f"{4 * files[0].stat().st_size / 1e9:.9f}"]
    train("dflash", tmp_path / "some", *some)
    assert len(list((tmp_path / "some" / "features").glob("*/*.safetensors"))) == 4
    assert len(reads) > 3

    with pytest.raises(
        ValueError, match=r"--keep-features 1e\+09 needs .* GB more in .*the disk has"
    ):
        train("dflash", tmp_path / "huge", "--keep-features", "1e9")


def test_states_depend_on_the_target(tmp_path):
    """States of another target, or of other layers, are not found; no state is given twice."""
    tokens = np.arange(6).reshape(2, 3)

    def states(depends: dict[str, object], fill: float) -> np.ndarray:
        made = features.Features(
            tmp_path, depends, (3, 2), 10**6, lambda t: np.full((*t.shape, 2), fill)
        )
        return made.of(tokens).astype(np.float32)

    assert (states({"target": "a", "taps": [1]}, 0.1) == np.float32(jnp.bfloat16(0.1))).all()
    assert (states({"target": "a", "taps": [1]}, 7.0) == np.float32(jnp.bfloat16(0.1))).all()
    assert (states({"target": "b", "taps": [1]}, 7.0) == 7.0).all()
    assert (states({"target": "a", "taps": [2]}, 8.0) == 8.0).all()


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_drafter_learns_inside_speculation(kind, tmp_path):
    """With `--online` its text is what the target writes, and its drafts start where they start
    when the target decodes with it; an interrupted run ends with the same bytes."""
    more = ["--online", "--sampled-prompt", "8", "--temperature", "0.8"]
    train(kind, tmp_path / "whole", *more)
    lines = [line for line in metrics(tmp_path / "whole") if "loss" in line]
    assert lines[-1]["loss"] < 0.95 * lines[0]["loss"]
    assert all(1 <= line["online_tau"] <= 4 for line in lines)
    train(kind, tmp_path / "parts", *more, "--stop-at", "8")
    train(kind, tmp_path / "parts", *more)
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts")


def test_drafts_of_a_step_are_those_of_a_decoder(tmp_path, monkeypatch):
    """The texts, anchors and learned positions of `--online`, against `Decoder.step`."""
    made: list[drafter.TrainDrafter] = []
    monkeypatch.setattr(drafter, "fit", lambda job, options: made.append(job))
    train("eagle3", tmp_path / "run", "--online", "--sampled-prompt", "8", "--temperature", "0.8")
    job = made[0]
    own, batch = job.init(), job.batch(3)
    drafts = jax.jit(job._speculated)(own, job.frozen, batch)

    drafting = job.drafter(own)
    decoder = Decoder(job.target.model, drafting.proposer, Match(), (), 33)
    params = Params(job.frozen, job.shared(drafting.params, job.frozen))
    state = decoder.prefill(
        params,
        batch["tokens"][:, :8],
        np.full(4, 8, np.int32),
        limit=np.full(4, 33, np.int32),
        sampling=Sampling.create(4, temperature=0.8, top_k=0, top_p=1.0),
        key=row_keys(0, batch["number"]),
    )
    step, pending = jax.jit(decoder.step), []
    for _ in range((33 - 8) // 4):
        pending.append(np.asarray(state.length) - 1)
        state, _ = step(params, state)
    np.testing.assert_array_equal(drafts.anchors, np.stack(pending, axis=1))
    np.testing.assert_array_equal(drafts.tokens, state.tokens[:, :33])
    at = np.arange(32) + 1
    np.testing.assert_array_equal(
        drafts.learned, (at >= 8) & (at < np.asarray(state.length)[:, None])
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--online", "--sampled-fraction", "0.5"], ["--online", "leave out --sampled-fraction"]),
        (["--online", "--keep-features", "1"], ["--online", "leave out --keep-features"]),
        (["--online", "--sampled-prompt", "30"], ["no room for --num-drafts 3"]),
        (["--online", "--sampled-prompt", "8", "--show-mask"], ["--show-mask: with --online"]),
        (["--keep-features", "-1"], ["--keep-features is -1"]),
        (["--taps", "9"], ["--taps names 9", "layers"]),
        (["--taps", "1", "1"], ["distinct and ascending"]),
        (["--mask-token", "5000"], ["--mask-token is 5000", "must lie in"]),
        (["--draft-vocab-size", "5000"], ["--draft-vocab-size is 5000", "must lie in"]),
        (["--draft-vocab-size", "9", "--no-own-head"], ["leave out --no-own-head"]),
        (["--num-drafts", "31"], ["--sequence-length is 32", "need 33"]),
        (["--anchors", "40"], ["--anchors is 40", "32 positions"]),
        (["--layout", "nobody's"], ["layout", "nobody's", "official"]),
        (["--depth-decay", "1.5"], ["--depth-decay is 1.5"]),
    ],
)
def test_bad_options_are_refused(more, words, tmp_path, capsys):
    with pytest.raises((SystemExit, ValueError)) as caught:
        train("eagle3", tmp_path / "run", *more)
    message = capsys.readouterr().err + str(caught.value)
    for word in words:
        assert word in message
    assert not (tmp_path / "run" / "model").exists()


def test_other_kinds_go_through_the_same_door(tmp_path, capsys):
    """`--kind model` and `--kind medusa` are train.distill and train.medusa."""
    for kind, own in (("model", "--online"), ("medusa", "--lora-rank")):
        with pytest.raises(SystemExit):
            drafter.main(["--kind", kind, "--help"])
        assert own in capsys.readouterr().out
    with pytest.raises(SystemExit):
        drafter.main(["--kind", "nothing"])
    message = capsys.readouterr().err
    assert all(f"'{kind}'" in message for kind in KINDS) and "--kind" in message
