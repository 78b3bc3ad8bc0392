"""Block drafts (DFlash, DFlash-2, JetSpec, DSpark, Domino) compared with the packages they are
from, on the same weights and over several blocks: see tests/fixtures/drafters/make.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import published
import pytest
from block_reference import BlockReference
from published_target import block, context, load, target
from started import started

from specjax import RULES, Decoder, Drafter, NoProposer, Params, Sampling
from specjax.caches import prefill
from specjax.methods import Slot
from specjax.proposers import BestFirst


def pairs(drafter):
    """A source with its parameters, and for each block its logits and reading."""
    source, params = drafter.source, drafter.arrays(target())
    features = published.features(len(source.taps))
    width, at, state = 9, 0, None
    init = jax.jit(lambda params, block: started(source, params, block, 32))
    observe, end = jax.jit(source.observe), jax.jit(source.end)
    marginals = jax.jit(
        lambda params, state, anchor: source.marginals(params, state, context(anchor))
    )
    for count, anchor in zip(published.COUNTS, published.ANCHORS, strict=True):
        new, at = features[:, at : at + count], at + count
        if state is None:
            state = init(params, block(new, width))
        else:
            state = observe(params, state, block(new, source.depth + 1))
        logits, known, reading = marginals(params, state, jnp.array([anchor]))
        assert known.all()
        yield source, params, logits, reading
        state = end(reading)


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


def test_the_selector_drafts_what_the_reference_drafts(tmp_path):
    """DFlash-2's greedy drafts, and the scores of the candidates of every slot."""
    made = published.fixture("dflash2")
    for number, (source, params, _, reading) in enumerate(pairs(load(tmp_path, "dflash2"))):
        wanted = made["steps"][number]["drafts"]
        logits = logits_along(source, params, reading, published.ANCHORS[number], wanted)
        assert logits.argmax(1).tolist() == wanted
    made = published.fixture("speculators_dflash2")
    drafter = load(tmp_path / "other", "speculators_dflash2")
    for number, (source, params, _, reading) in enumerate(pairs(drafter)):
        drafts = published.path(number, source.depth)
        logits = logits_along(source, params, reading, published.ANCHORS[number], drafts)
        step = made["steps"][number]
        scores = np.take_along_axis(logits, np.array(step["candidates"]), axis=1)
        np.testing.assert_allclose(scores, step["scores"], rtol=0, atol=1e-4)
        assert (np.isfinite(logits).sum(1) == len(step["candidates"][0])).all()


SURE = [name for name in CORRECTED if "confidence" in published.fixture(name)["steps"][0]]


@pytest.mark.parametrize("name", SURE)
def test_confidences_are_those_of_the_reference(name, tmp_path):
    """A threshold between two of them ends the path before the lower one."""
    made, drafter = published.fixture(name), load(tmp_path / name, name)
    for number, (source, params, _, reading) in enumerate(pairs(drafter)):
        wanted = np.array(made["steps"][number]["confidence"])
        threshold = float(np.sort(wanted)[-2:].mean())
        source = dataclasses.replace(source, confidence_threshold=threshold)
        before = [published.ANCHORS[number], *published.path(number, source.depth)]
        memory, goes_on = None, []
        for depth in range(source.depth):
            made_ = source.correct(params, reading, depth, jnp.array([[before[depth]]]), memory)
            memory = made_.memory
            goes_on.append(bool(made_.goes_on[0, 0]))
            slot = Slot(
                depth, reading.hidden[:, depth], reading.logits[:, depth],
                jnp.array([[before[depth]]]), lambda: None,
            )  # fmt: skip
            sure = source.correction.confidence(params.own["correction"], slot)
            np.testing.assert_allclose(sure[0, 0], wanted[depth], rtol=0, atol=1e-4)
        assert goes_on == (wanted >= threshold).tolist()


# --- while a text is decoded ----------------------------------------------------------------------

PROMPTS = np.array([[3, 9, 4, 1, 7, 2, 0, 0], [8, 1, 0, 0, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0, 0, 0]])
LENGTHS = np.array([6, 2, 1])
DECODED = ["dflash_sliding", "dflash2", "jetspec", "dspark_rnn", "domino_shifted"]


def decoder(drafter, rule="match", capacity=40):
    return Decoder(target().model, drafter.proposer, RULES[rule](), (), capacity)


def start(dec, drafter, prompts=PROMPTS, lengths=LENGTHS, temperature=0.0):
    rows = len(prompts)
    params = Params(target().params, drafter.arrays(target(), rows))
    state = dec.prefill(
        params,
        prompts.astype(np.int32),
        lengths.astype(np.int32),
        limit=np.full(rows, dec.capacity, np.int32),
        sampling=Sampling.create(rows, temperature),
        key=jax.random.split(jax.random.key(0), rows),
    )
    return params, state


@functools.partial(jax.jit, static_argnums=0)
def propose(dec, params, state):
    return dec.propose(params, state)[0]


def shaped(name, folder, kind):
    drafter = load(folder, name)
    return drafter if kind == "chain" else drafter.shaped(BestFirst, num_nodes=6, width=2)


@pytest.mark.parametrize(
    ("name", "kind"), [(name, "chain") for name in DECODED] + [("dspark_rnn", "tree")]
)
def test_the_context_does_not_depend_on_how_it_came(name, kind, tmp_path):
    """After some steps, with rejected blocks, the drafts are those of a fresh prefill of the text,
    which is read in chunks."""
    drafter = shaped(name, tmp_path, kind)
    dec = decoder(drafter)
    params, state = start(dec, drafter, temperature=1.0)
    state = dec.run(params, state, 5)
    assert (state.length > LENGTHS + 4).all()
    text, length = np.asarray(state.tokens)[:, :34], np.asarray(state.length)
    proposal = jax.device_get(propose(dec, params, state))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "CHUNK", 8)
        other = decoder(drafter, capacity=41)
        _, fresh = start(other, drafter, text, length, temperature=1.0)
    again = jax.device_get(propose(other, params, fresh))
    np.testing.assert_array_equal(again.tokens, proposal.tokens)
    np.testing.assert_array_equal(again.parent, proposal.parent)


@pytest.mark.parametrize(
    ("name", "rule"),
    [(name, "match") for name in DECODED] + [("dspark_rnn", "rejection"), ("dflash2", "block")],
)
def test_greedy_texts_are_those_of_plain_decoding(name, rule, tmp_path):
    """A folder is loaded, and its drafts change no text: greedy, and under `match` any text."""
    drafter = load(tmp_path, name)
    for temperature in (0.0, 1.0) if rule == "match" else (0.0,):
        dec = decoder(drafter, rule)
        params, state = start(dec, drafter, temperature=temperature)
        texts = np.asarray(dec.run(params, state).tokens)[:, :40]
        np.testing.assert_array_equal(texts, plain(temperature))


@functools.cache
def plain(temperature):
    dec = Decoder(target().model, NoProposer(), RULES["match"](), (), 40)
    params, state = start(dec, Drafter(dec.proposer), temperature=temperature)
    return np.asarray(dec.run(params, state).tokens)[:, :40]


def features_of(tokens, taps):
    """[B, T, F] the target's features, without a cache."""
    read = jax.jit(functools.partial(target().model.apply, taps=taps))
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    return np.asarray(read(target().params, tokens, positions).features)


@pytest.mark.parametrize("name", [name for name in published.NAMES if "speculators" not in name])
def test_greedy_drafts_are_those_of_a_reference_without_caches(name, tmp_path):
    """In NumPy, block after block of texts that are decoded greedily."""
    drafter, made = load(tmp_path, name), published.fixture(name)
    reference = BlockReference(
        made["config"], published.weights(made["tensors"]), published.embedding(), published.head()
    )
    dec = decoder(drafter)
    params, state = start(dec, drafter)
    tokens = plain(0.0)
    features = features_of(tokens, drafter.source.taps)
    compared = 0
    for _ in range(8):
        proposal = jax.device_get(propose(dec, params, state))
        for row, length in enumerate(np.asarray(state.length)):
            if state.done[row]:
                continue
            wanted = reference.drafts(features[row, : length - 1], int(tokens[row, length - 1]))
            assert proposal.tokens[row, 1:].tolist() == wanted
            compared += 1
        state = dec.run(params, state, 1)
    assert compared >= 20
