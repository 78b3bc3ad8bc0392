"""Processors equal `reference.py` at every node of a tree, and `reference.py` equals
transformers.

`fixtures/make_transformers.py` stored what transformers says.
"""

import dataclasses
import types

import jax.numpy as jnp
import numpy as np
import pytest
import stored
from processed import FEW, LENGTH, PARENT, PROMPT_LENGTH, SETTINGS, THEIRS, nodes
from reference import OFF, no_repeated_pair, no_repeated_pair_reference, reference

from specjax import Processors, eos_of_rows, tree
from specjax.processors import process


def begun(processors, tokens, counted=False):
    """The state after prefill and one block."""
    processors = processors.begin(jnp.asarray(tokens), jnp.asarray(PROMPT_LENGTH), FEW, counted)
    output = np.stack([np.roll(row, -n) for row, n in zip(tokens, PROMPT_LENGTH, strict=True)])
    processors = processors.observe(jnp.asarray(output), jnp.asarray(LENGTH - PROMPT_LENGTH))
    eos = eos_of_rows([[0], [3, 5], []])
    return types.SimpleNamespace(
        processors=processors, tokens=jnp.asarray(tokens), length=LENGTH, eos=jnp.asarray(eos),
        done=jnp.zeros(3, bool),
    )  # fmt: skip


@pytest.mark.parametrize("function", [None, no_repeated_pair], ids=["", "function"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_node_is_processed_by_its_own_text(setting, function):
    """Each node is processed as if its path were already committed, for trees of several shapes."""
    tokens, logits, path, texts = nodes()
    state = begun(Processors.create(3, FEW, **SETTINGS[setting]), tokens, function is not None)
    processed = np.asarray(process(state, jnp.asarray(logits), path, function, 20))
    changed = 0
    for row, eos in enumerate([[0], [3, 5], []]):
        for node, text in enumerate(texts[row]):
            own = no_repeated_pair_reference if function else None
            wanted = reference(
                logits[row, node], text, PROMPT_LENGTH[row], eos, SETTINGS[setting], own
            )
            np.testing.assert_array_equal(np.isneginf(processed[row, node]), np.isneginf(wanted))
            np.testing.assert_allclose(processed[row, node], wanted, rtol=1e-6)
            changed += not np.array_equal(wanted, logits[row, node])
    assert changed > 3


def test_a_function_alone():
    """A user's function works without any other processor."""
    tokens, logits, path, texts = nodes()
    processed = process(
        begun(Processors(), tokens, True), jnp.asarray(logits), path, no_repeated_pair, 20
    )
    for row, node in np.ndindex(PARENT.shape):
        text = texts[row][node]
        wanted = no_repeated_pair_reference(logits[row, node], text, text[PROMPT_LENGTH[row] :])
        np.testing.assert_allclose(processed[row, node], wanted, rtol=1e-6)


@pytest.mark.parametrize("setting", SETTINGS)
def test_without_a_path_all_nodes_stand_at_the_root(setting):
    """Without a path, the proposer's warp uses the text at the root."""
    tokens, logits, path, _ = nodes()
    state = begun(Processors.create(3, FEW, **SETTINGS[setting]), tokens)
    nowhere = jnp.full_like(path, tree.ABSENT)
    np.testing.assert_array_equal(process(state, logits), process(state, logits, nowhere))


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_engine_skips_settings_that_are_off(setting):
    """Its rows have room for every setting, and one row with a setting is enough."""
    tokens, logits, path, _ = nodes()
    given = SETTINGS[setting]
    states = [
        begun(Processors.create(3, FEW, **given, every=every), tokens) for every in (True, False)
    ]
    for state in states:
        state.done = jnp.zeros(3, bool)
    room, alone = states
    assert room.processors.used.all()
    wanted = process(alone, jnp.asarray(logits), path)
    assert np.array_equal(process(room, jnp.asarray(logits), path), wanted)
    room.processors = dataclasses.replace(room.processors, used=np.array([False, True, False]))
    assert np.array_equal(process(room, jnp.asarray(logits), path), wanted)
    room.done = jnp.asarray([False, True, False])  # what has ended counts no more
    assert np.array_equal(process(room, jnp.asarray(logits), path), logits)
    off = Processors.create(3, FEW, every=True)
    assert not off.used.any()
    assert np.array_equal(process(begun(off, tokens), jnp.asarray(logits), path), logits)


def test_each_row_has_its_own_processors():
    """In a mixed batch each row is processed as if alone, and a row without settings is
    unchanged."""
    tokens, logits, path, _ = nodes()
    several = {
        name: [OFF[name], SETTINGS["all"][name], SETTINGS["all"][name]]
        for name in OFF
        if name not in ("bad_words",)
    }
    processed = process(begun(Processors.create(3, FEW, **several), tokens), logits, path)
    alone = SETTINGS["all"] | {"bad_words": []}
    wanted = process(begun(Processors.create(3, FEW, **alone), tokens), logits, path)
    np.testing.assert_array_equal(processed[0], logits[0])
    np.testing.assert_array_equal(processed[1:], wanted[1:])


def test_what_is_off_is_none():
    """Neutral settings have no arrays, and each other setting adds only its own."""
    assert Processors.create(3, FEW) is None
    assert Processors.create(3, FEW, **OFF) is None
    made = Processors.create(3, FEW, presence_penalty=[0, 0, 1])
    assert made.penalties is not None and made.bias is made.phrases is made.min_length is None
    made = Processors.create(3, FEW, bad_words=[[1]])
    assert made.bias is not None and made.penalties is made.phrases is None
    everything = Processors.create(3, FEW, every=True)
    made = (everything.penalties, everything.bias, everything.phrases, everything.min_length)
    assert all(part is not None for part in made)
    tokens, logits, path, _ = nodes()
    np.testing.assert_array_equal(process(begun(everything, tokens), logits, path), logits)


def test_phrases_of_few_sizes():
    """Their array has the least powers of two, from 4, that hold them, so programs are shared."""
    for count, length, shape in ((1, 2, (4, 4)), (4, 4, (4, 4)), (5, 5, (8, 8)), (9, 3, (16, 4))):
        phrases = [[first % FEW] * (length - 1) + [0] for first in range(count)]
        made = Processors.create(3, FEW, bad_words=phrases)
        assert made is not None and made.phrases is not None
        assert made.phrases.shape[-2:] == shape


@pytest.mark.parametrize("setting", THEIRS)
def test_the_reference_is_transformers(setting):
    """The reference agrees with transformers text by text, so that it can stand for it above."""
    settings = SETTINGS[setting] | {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    _, logits, _, texts = nodes()
    theirs = stored.arrays()[f"processed {setting}"]
    for row, node in np.ndindex(PARENT.shape):
        made = reference(logits[row, node], texts[row][node], 3, [0, 5], settings)
        np.testing.assert_allclose(made, theirs[row, node], rtol=1e-6)
