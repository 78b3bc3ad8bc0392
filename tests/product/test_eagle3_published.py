"""Heads that speculators and SpecForge saved: our logits are theirs, along accepted and drafted
tokens.

tests/fixtures/drafters/make_eagle3.py made the folders, with the versions that it names.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from started import started

import specjax
from specjax import LanguageModel, LinenModel, Transformer, TransformerConfig
from specjax.contract import Context, Lookahead
from specjax.types import Block

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "drafters"
SEQUENTIAL = (
    "eagle3-speculators",
    "eagle3-speculators-3.1",
    "eagle3-speculators-one-norm",
    "eagle3-specforge",
    "eagle3-specforge-fc-norm",
)
STEPS, LENGTH, VOCAB = 3, 5, 20


def read(name):
    """What a package expects, and the drafter over a target with its embedding."""
    expected = json.loads((FIXTURES / name / "expected.json").read_text())
    config = TransformerConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        mlp_size=8,
        num_layers=7,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_positions=64,
    )
    model = LinenModel(Transformer(config))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)
    params["embedding"] = jnp.array(expected.get("embedding", np.zeros((VOCAB, 8))))
    loaded = LanguageModel(model, params, name="fixture")
    made = specjax.load_drafter(FIXTURES / name, loaded)
    return expected, made, made.arrays(loaded)


def on_target(name, rows):
    """Logits [..., Vd] of a package -> [..., V] by its d2t, read here."""
    header = specjax.drafters.open_drafter(FIXTURES / name)[2]["d2t"]
    table = np.memmap(header.file, "<i8", "r", header.start, header.shape)
    full = np.full((*np.shape(rows)[:-1], VOCAB), -np.inf)
    full[..., np.arange(len(table)) + table] = rows
    return full


def context(pending):
    return Context(jnp.array([pending]), None, None, True, False, None)


def close(found, wanted):
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(np.isfinite(found), finite)
    np.testing.assert_allclose(found[finite], wanted[finite], rtol=0, atol=1e-4)


def logits_in_turn(made, params, features, tokens):
    """Our logits [V] for each (step, t) of the fixtures: the drafts after t are given."""
    # The features of a prompt are as many as its tokens; the last, of the pending one, is not read.
    features = jnp.pad(jnp.asarray(features)[None], ((0, 0), (0, 1), (0, 0)))
    source, lookahead = made.source, Lookahead(STEPS, STEPS + 1, True)
    text = jnp.array([[0, *tokens]])  # the token before the first feature's is not read

    @jax.jit
    def begin(count, pending):
        block = Block(text, features, count[None], features)
        state = started(source, params, block, 16, lookahead)
        return source.begin(params, state, context(pending))[1:]

    extend = jax.jit(lambda reading, token: source.extend(params, reading, token[None]))
    for t in range(LENGTH):
        reading, logits = begin(jnp.int32(t + 1), jnp.int32(tokens[t]))
        for step in range(min(STEPS, LENGTH - t)):
            yield step, t, np.asarray(logits[0])
            if t + step + 1 < LENGTH:
                reading, logits = extend(reading, jnp.int32(tokens[t + step + 1]))


def logits_at_once(made, params, features, tokens):
    """Our logits for each (step, t) that has all of the steps, each t in one pass."""
    features = jnp.pad(jnp.asarray(features)[None], ((0, 0), (0, 1), (0, 0)))
    text = jnp.array([[0, *tokens]])

    @jax.jit
    def marginals(count, pending):
        state = started(made.source, params, Block(text, features, count[None], features), 16)
        return made.source.marginals(params, state, context(pending))[0]

    for t in range(LENGTH - STEPS + 1):
        found = np.asarray(marginals(jnp.int32(t + 1), jnp.int32(tokens[t])))[0]
        yield from ((step, t, found[step]) for step in range(STEPS))


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_logits_are_those_of_the_package(name):
    expected, made, params = read(name)
    wanted = on_target(name, expected["logits"])
    for step, t, found in logits_in_turn(made, params, expected["features"], expected["tokens"]):
        close(found, wanted[step, t])


def test_logits_of_one_pass_are_those_of_the_package():
    name = "peagle-speculators"
    expected, made, params = read(name)
    assert (made.source.depth, made.source.mask_token) == (STEPS, 7)
    wanted = on_target(name, expected["logits"])
    for step, t, found in logits_at_once(made, params, expected["features"], expected["tokens"]):
        close(found, wanted[step, t])
