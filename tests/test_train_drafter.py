"""What a drafter learns from is what it will read when it drafts: the view of training, against
the state of a decoder, position by position; and the job as a user runs it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from specjax.contract import Context, Lookahead
from specjax.models import SharedParams, dot_general, head_matrix
from specjax.proposers import Eagle3Source
from specjax.training.drafters import KINDS, Learner, Lesson, plan
from specjax.types import Block

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
    own = learner.init(jax.random.key(2))
    if learner.own_head:
        own["head"] = {"kernel": head_matrix(params)}
    leaves, structure = jax.tree.flatten(own)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    own = jax.tree.unflatten(
        structure,
        [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)],
    )
    names = ("embedding",) if learner.own_head else ("embedding", "head")
    return SharedParams(own, {name: params[name] for name in names})


@functools.cache
def read() -> tuple[np.ndarray, np.ndarray]:
    """The target's features [2, T, F] and last hidden states of the texts."""
    net, params, texts = target()
    positions = np.broadcast_to(np.arange(LENGTH), (2, LENGTH))
    out = net.apply(params, texts[:, :-1], positions, taps=(1, 2))
    return np.asarray(out.features), np.asarray(out.hidden)


def drafted(learner: Learner, params: SharedParams, anchor: int) -> np.ndarray:
    """[2, D, V] what the source predicts along the text when the token at `anchor` is pending."""
    _, _, texts = target()
    features, hidden = read()
    count = np.full(2, anchor)
    prompt = Block(
        jnp.asarray(texts[:, : anchor + 1]),
        jnp.asarray(hidden[:, : anchor + 1]),
        jnp.asarray(count),
        jnp.asarray(features[:, : anchor + 1]),
    )
    source, pending = learner.source, jnp.asarray(texts[:, anchor])
    context = Context(pending, None, None, True, False, None)  # type: ignore[arg-type]
    if isinstance(source, Eagle3Source):
        state = source.init(params, prompt, 32, Lookahead(DRAFTS, 1, True))
        _, reading, logits = source.begin(params, state, context)
        rows = [logits]
        for depth in range(1, DRAFTS):
            reading, logits = source.extend(
                params, reading, jnp.asarray(texts[:, min(anchor + depth, LENGTH)])
            )
            rows.append(logits)
        return np.stack(rows, axis=1)
    state = source.init(params, prompt, 32)
    marginals, _, reading = source.marginals(params, state, context)
    if not source.corrects:
        return np.asarray(marginals)
    rows, memory = [], None
    for depth in range(DRAFTS):
        previous = jnp.asarray(texts[:, min(anchor + depth, LENGTH)])[:, None]
        made = source.correct(params, reading, depth, previous, memory)
        memory = made.memory
        rows.append(made.logits[:, 0])
    return np.stack(rows, axis=1)


@pytest.mark.parametrize("name", CASES)
def test_training_reads_what_a_decoder_reads(name, monkeypatch):
    """At every anchor and depth the logits are those of the source in a decoder."""
    for module in ("eagle3", "block"):  # training rounds to bfloat16
        monkeypatch.setattr(f"specjax.training.drafters.{module}.mixed_dot_general", dot_general)
    kind, sizes = CASES[name]
    net, _, texts = target()
    learner = plan(kind, sizes, net.module.config, MASK)
    params = random_params(learner)
    features, _ = read()
    anchors = np.array([[1, 4, 5, 9], [2, 3, 8, 9]])
    lesson = Lesson(
        jnp.asarray(texts),
        jnp.ones((2, LENGTH)),
        jnp.asarray(features),
        jnp.asarray(anchors),
        jnp.ones(anchors.shape),
    )
    guesses = learner.guesses(params, lesson)
    assert [guess.depth for guess in guesses] == list(range(DRAFTS))
    matrix = learner.head(params)
    compared = 0
    for guess in guesses:
        logits = np.asarray(guess.hidden @ matrix)
        for row in range(2):
            for column, at in enumerate(np.asarray(guess.at[row])):
                if not guess.weight[row, column]:
                    continue
                wanted = drafted(learner, params, int(at) - guess.depth)[row, guess.depth]
                np.testing.assert_allclose(logits[row, column], wanted, rtol=0, atol=2e-4)
                compared += 1
    assert compared >= 2 * 4 * DRAFTS - 4
