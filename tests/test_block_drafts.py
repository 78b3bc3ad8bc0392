"""Block drafts (DFlash, DFlash-2, JetSpec, DSpark, Domino) compared with the packages they are
from, on the same weights and over several blocks: see tests/fixtures/drafters/make.py."""

import jax.numpy as jnp
import numpy as np
import published
import pytest
from published_target import block, context, load, target


def pairs(drafter):
    """A source with its parameters, and for each block its logits and reading."""
    source, params = drafter.source, drafter.arrays(target())
    features = published.features(len(source.taps))
    width, at, state = 9, 0, None
    for count, anchor in zip(published.COUNTS, published.ANCHORS, strict=True):
        new, at = features[:, at : at + count], at + count
        if state is None:
            state = source.init(params, block(new, width), 32)
        else:
            state = source.observe(params, state, block(new, source.depth + 1))
        logits, known, reading = source.marginals(params, state, context([anchor]))
        assert known.all()
        yield source, params, logits, reading
        state = source.end(reading)


def logits_along(source, params, reading, anchor, drafts):
    """[D, V] logits of each depth after the drafts above it."""
    previous, memory, logits = anchor, None, []
    for depth, draft in enumerate(drafts):
        tokens = jnp.array([[previous]])
        made = source.correct(params, reading, depth, tokens, memory)
        logits.append(made.logits[0, 0])
        memory, previous = made.memory, int(draft)
    return np.stack(logits)


@pytest.mark.parametrize("name", published.NAMES)
def test_logits_are_those_of_the_reference(name, tmp_path):
    """Those of one pass, over three blocks with a growing context."""
    made = published.fixture(name)
    ids = [i for i, _ in enumerate(made["tensors"].get("d2t", {}).get("values", []))]
    drafter = load(tmp_path / name, name)
    for step, (_, _, logits, _) in zip(made["steps"], pairs(drafter), strict=True):
        wanted = np.array(step["logits"])
        if ids:
            known = np.array(made["tensors"]["d2t"]["values"]) + ids
            others = np.delete(np.asarray(logits[0]), known, axis=1)
            assert (others == -np.inf).all()
            logits = logits[..., known]
        np.testing.assert_allclose(logits[0], wanted, rtol=0, atol=1e-4)


CORRECTED = [name for name in published.NAMES if "corrected" in published.fixture(name)["steps"][0]]


@pytest.mark.parametrize("name", CORRECTED)
def test_corrected_logits_are_those_of_the_reference(name, tmp_path):
    """After drafts that are given, for each block."""
    made = published.fixture(name)
    drafter = load(tmp_path / name, name)
    for number, (source, params, _, reading) in enumerate(pairs(drafter)):
        drafts = published.path(number, source.depth)
        logits = logits_along(source, params, reading, published.ANCHORS[number], drafts)
        if "d2t" in made["tensors"]:
            offset = np.array(made["tensors"]["d2t"]["values"])
            logits = logits[:, offset + np.arange(len(offset))]
        np.testing.assert_allclose(logits, made["steps"][number]["corrected"], rtol=0, atol=1e-4)
