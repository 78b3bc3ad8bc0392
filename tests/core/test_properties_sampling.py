"""Drawn settings of sampling and penalties against NumPy, one token at a time."""

from __future__ import annotations

import functools
import itertools
import types

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from properties import law, parents, seeds
from reference import reference
from trees import ancestors

from specjax import Processors, Sampling, eos_of_rows, sampling, tree
from specjax.processors import process

ROWS, NODES, VOCAB = 3, 2, 23
warp = jax.jit(sampling.warp)


def naive_warp(logits, temperature, top_k, top_p, min_p):
    """[V] float64: temperature, top-k, top-p, min-p; what ties with the last token kept is kept."""
    if temperature == 0:
        return np.where(np.arange(VOCAB) == logits.argmax(), 0.0, -np.inf)
    x = logits.astype(np.float64) / max(temperature, 1e-20)
    if top_k:
        x = np.where(x >= np.sort(x)[::-1][min(top_k, VOCAB) - 1], x, -np.inf)
    if top_p < 1:
        probs = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
        least = next(t for t in np.unique(probs)[::-1] if probs[probs >= t].sum() >= top_p or not t)
        x = np.where(probs >= least, x, -np.inf)
    if min_p:
        x = np.where(x >= x.max() + np.log(min_p), x, -np.inf)
    return x


of_a_row = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1.0]) | st.floats(0.0625, 4, width=32),
        "top_k": st.integers(0, VOCAB + 2),
        "top_p": st.just(1.0) | st.floats(2**-7, 1, width=32),
        "min_p": st.just(0.0) | st.floats(0, 1, width=32),
    }
)
"""A third or so of the settings are off."""


def test_a_warp_keeps_the_tokens_that_numpy_keeps():
    """Rows have settings of their own; half of the logits are whole numbers, so that they tie."""
    kept = set()

    @law(300)
    @given(st.lists(of_a_row, min_size=ROWS, max_size=ROWS), st.booleans(), seeds)
    def check(rows, ties, seed):
        logits = 2 * np.random.default_rng(seed).normal(size=(ROWS, NODES, VOCAB))
        logits = (np.round(logits) if ties else logits).astype(np.float32)
        settings = Sampling.create(ROWS, **{name: [row[name] for row in rows] for name in rows[0]})
        warped = np.asarray(warp(logits, settings))
        for row, node in np.ndindex(ROWS, NODES):
            # A sum of probabilities that rounds across top_p may keep a token more or less.
            near = itertools.product((1 - 1e-5, 1, 1 + 1e-5), repeat=2)
            wanted = [
                naive_warp(
                    logits[row, node],
                    **rows[row]
                    | {"top_p": min(rows[row]["top_p"] * p, 1), "min_p": rows[row]["min_p"] * m},
                )
                for p, m in near
            ]
            same = [x for x in wanted if ((x > -np.inf) == (warped[row, node] > -np.inf)).all()]
            assert same, (rows[row], logits[row, node])
            np.testing.assert_allclose(warped[row, node], same[0], rtol=1e-5)
            kept.add(int((same[0] > -np.inf).sum()))

    check()
    # Which examples are drawn depends on the constants of all modules that were imported before.
    assert 1 in kept and len(kept) >= VOCAB - 2


FEW, PROMPT, TEXT, DEPTH, WORDS = 8, 6, 12, 4, 4
"""Tokens of a small vocabulary, so that texts repeat; lengths; the greatest depth of a tree; at
most so many banned sequences, of at most so many tokens."""

tokens = st.integers(0, FEW - 1)
penalties = st.fixed_dictionaries(
    {
        "repetition_penalty": st.just(1.0) | st.floats(0.5, 2, width=32),
        "presence_penalty": st.just(0.0) | st.floats(-2, 2, width=32),
        "frequency_penalty": st.just(0.0) | st.floats(-2, 2, width=32),
        "logit_bias": st.dictionaries(
            tokens, st.just(-np.inf) | st.floats(-4, 4, width=32), max_size=3
        ),
        "min_new_tokens": st.integers(0, 8),
    }
)
words = st.lists(st.lists(tokens, min_size=1, max_size=WORDS), max_size=WORDS)


@functools.partial(jax.jit, static_argnums=6)
def processed(processors, texts, prompt_length, length, eos, tree_of, max_depth, logits):
    """Logits [B, N, V] after each node, processed as in a step."""
    nodes, parent = tree_of
    begun = processors.begin(texts, prompt_length, FEW, False)
    output = jax.vmap(lambda row, n: jax.numpy.roll(row, -n))(texts, prompt_length)
    begun = begun.observe(output, length - prompt_length)
    done = jax.numpy.zeros(len(texts), bool)
    state = types.SimpleNamespace(processors=begun, tokens=texts, length=length, eos=eos, done=done)
    path = jax.vmap(lambda t, p: tree.path_tokens(t, p, max_depth))(nodes, parent)
    return process(state, logits, path)


def test_a_node_is_penalised_by_its_own_text():
    """Rows have settings, prompts, texts and trees of their own; a node counts its own path."""
    size, changed = 9, 0

    @law(60)
    @given(
        st.lists(penalties, min_size=ROWS, max_size=ROWS),
        words,
        st.lists(parents(size, DEPTH, size), min_size=ROWS, max_size=ROWS),
        seeds,
    )
    def check(rows, bad_words, forest, seed):
        nonlocal changed
        rng = np.random.default_rng(seed)
        texts = rng.integers(0, FEW, (ROWS, TEXT + DEPTH), np.int32)
        prompt_length = rng.integers(1, PROMPT + 1, ROWS).astype(np.int32)
        length = rng.integers(prompt_length, TEXT + 1).astype(np.int32)
        drafted = rng.integers(0, FEW, (ROWS, size), np.int32)
        drafted[:, 0] = texts[np.arange(ROWS), length - 1]
        logits = 3 * rng.normal(size=(ROWS, size, FEW)).astype(np.float32)
        ends = [[0], [3, 5], []]
        processors = Processors.create(
            ROWS, FEW, bad_words=bad_words, every=True,
            **{name: [row[name] for row in rows] for name in rows[0]},
        )  # fmt: skip
        made = np.asarray(
            processed(
                processors, texts, prompt_length, length, eos_of_rows(ends),
                (drafted, np.array(forest)), DEPTH, logits,
            )
        )  # fmt: skip
        for row, node in np.ndindex(ROWS, size):
            way = ancestors(forest[row], node)
            if way[0] != 0:
                continue  # an absent node has no text
            text = texts[row, : length[row]].tolist() + drafted[row, way[1:]].tolist()
            settings = rows[row] | {"bad_words": bad_words}
            wanted = reference(logits[row, node], text, prompt_length[row], ends[row], settings)
            np.testing.assert_array_equal(np.isneginf(made[row, node]), np.isneginf(wanted))
            np.testing.assert_allclose(made[row, node], wanted, rtol=1e-5, atol=1e-5)
            changed += not np.array_equal(wanted, logits[row, node])

    check()
    assert changed > 300
