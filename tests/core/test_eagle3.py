"""EAGLE-3 heads in every published layout draft what a NumPy reference drafts, which has no cache.

The reference (`eagle3_reference.Reference`) reads the same files by their published names and the
target's hidden states from transformers, and computes everything again for every token.
"""

import functools
import warnings

import counted
import eagle3_folders
import eagle3_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Chain, Decoder, DynamicTree, Params, Sampling, StaticTree
from specjax.caches import prefill
from specjax.contract import Context, Lookahead
from specjax.prefilling import _read_prompts
from specjax.rules.confidence import follow
from specjax.types import Block

ROWS, WIDTH, CAPACITY, DEPTH = 3, 12, 96, 3
LENGTHS = np.array([12, 5, 2], np.int32)


class Most(specjax.contract.Rule):
    """Accepts drafts that are no multiple of three."""

    exact, shared_noise = False, True

    def __call__(self, draw, proposal, tree, logits):
        return follow(draw, tree, logits, proposal.tokens % 3 > 0)


@functools.cache
def target(kind):
    return specjax.load(eagle3_folders.target(kind))


@functools.cache
def drafter(layout, *shape, **numbers):
    loaded = target(eagle3_folders.LAYOUTS[layout][3])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*norm_output=true is read as it is served")
        return specjax.load_drafter(eagle3_folders.folder(layout), loaded, *shape, **numbers)


def begun(layout, proposer, rule, prompt, lengths, capacity=CAPACITY, temperature=0.0):
    """A decoder, its parameters and its state after the prompts."""
    loaded = target(eagle3_folders.LAYOUTS[layout][3])
    arrays = Params(loaded.params, drafter(layout, Chain, num_drafts=DEPTH).arrays(loaded))
    dec = Decoder(loaded.model, proposer, rule, (), capacity)
    state = dec.prefill(
        arrays,
        prompt,
        lengths,
        limit=np.full(len(prompt), capacity, np.int32),
        sampling=Sampling.create(len(prompt), temperature),
        key=jax.random.split(specjax.make_key(0), len(prompt)),
    )
    return dec, arrays, state


def prompts(seed=0):
    return np.random.default_rng(seed).integers(1, 320, (ROWS, WIDTH)).astype(np.int32)


def texts(state):
    pairs = zip(np.asarray(state.tokens), np.asarray(state.length), strict=True)
    return [row[:length].tolist() for row, length in pairs]


@pytest.mark.parametrize("layout", eagle3_folders.LAYOUTS)
def test_drafts_are_those_of_the_reference(layout):
    """Over several blocks, in which drafts are accepted and rejected.

    The rule accepts most drafts, right or wrong, since a random head is seldom right.
    """
    reference = eagle3_reference.reference(layout)
    proposer = drafter(layout, Chain, num_drafts=DEPTH).proposer
    rule = Most()
    dec, arrays, state = begun(layout, proposer, rule, prompts(), LENGTHS)
    step, accepted = jax.jit(dec.step), []
    for _ in range(5):
        before = texts(state)
        state, info = step(arrays, state)
        drafts = np.asarray(info.proposal.tokens)[:, 1:].tolist()
        assert drafts == [reference.drafts(text, DEPTH) for text in before]
        accepted += info.num_accepted.tolist()
    assert min(accepted) < DEPTH == max(accepted), accepted


@pytest.mark.parametrize("layout", ["authors, 3.1", "ModelOpt, two layers", "DeepSpec"])
def test_logits_are_those_of_the_reference(layout):
    """Along a chain and at every node of random trees, within 1e-4 of their spread."""
    reference, loaded = (
        eagle3_reference.reference(layout),
        target(eagle3_folders.LAYOUTS[layout][3]),
    )
    made = drafter(layout, Chain, num_drafts=DEPTH)
    source, params = made.source, made.arrays(loaded)
    text, tokens = prompts(1)[0].tolist(), np.array([[4, 9, 4, 30, 31, 32, 33]])
    parent = np.array([-1, -1, 0, 1, 1, 2, 3])  # of the nodes below the pending token
    lookahead = Lookahead(DEPTH, 1 + len(parent), False)

    @jax.jit
    def read(params, features):
        block = Block(jnp.array([text]), features, jnp.array([WIDTH - 1]), features)
        state = source.init(params, block, CAPACITY, lookahead)
        context = Context(jnp.array([text[-1]]), None, None, True, False, None)
        state, reading, root = source.begin(params, state, context)
        found = [root]
        for level, depth in ((2, [0] * 2), (5, [0, 0, 1, 1, 1]), (7, [0, 0, 1, 1, 1, 2, 2])):
            above = np.eye(level, dtype=bool)
            for n in range(level):
                if parent[n] >= 0:
                    above[n] |= above[parent[n]]
            at = np.flatnonzero(np.array(depth) == max(depth))[None]
            reading, logits = source.read_tree(
                params,
                reading,
                jnp.asarray(tokens[:, :level]),
                jnp.asarray(at),
                jnp.array(depth),
                jnp.asarray(above[None]),
            )
            found += list(logits.swapaxes(0, 1))
        state = source.end(params, state, reading, None)
        return jnp.concatenate(found), state.cache.length

    features = loaded.model.apply(
        loaded.params,
        jnp.array([text]),
        jnp.arange(WIDTH)[None],
        taps=source.taps,
    ).features
    found, length = read(params, features)
    assert length.tolist() == [WIDTH - 1]  # the drafts are taken back
    paths = [(), *(_path(parent, tokens[0], n) for n in range(len(parent)))]
    for logits, path in zip(np.asarray(found), paths, strict=True):
        wanted = reference.logits(text, path)
        finite = np.isfinite(wanted)
        np.testing.assert_array_equal(np.isfinite(logits), finite)
        assert np.abs(logits[finite] - wanted[finite]).max() < 1e-4 * wanted[finite].std(), path


def _path(parent, tokens, node):
    return () if node < 0 else (*_path(parent, tokens, parent[node]), int(tokens[node]))


SHAPES = {
    "chain": (Chain, {"num_drafts": DEPTH}),
    "tree": (StaticTree, {"branching": (3, 2)}),
    "dynamic tree": (DynamicTree, {"depth": 4, "width": 3, "num_nodes": 12}),
}


@pytest.mark.parametrize(
    "shape",
    [pytest.param(s, marks=() if s == "dynamic tree" else pytest.mark.slow) for s in SHAPES],
)
def test_generate_writes_what_plain_decoding_writes(shape):
    """Greedily, and at temperature 1 for the same seed; drafts are accepted now and then.

    By default the shape that the authors' folders ask for. `test_laws.py` has the law for all three
    shapes over such a head.
    """
    loaded = target("llama")
    kind, numbers = SHAPES[shape]
    made = specjax.load_drafter(eagle3_folders.folder("authors"), loaded, kind, **numbers)
    asked = [row[:length].tolist() for row, length in zip(prompts(2), LENGTHS, strict=True)]
    for temperature in (0.0, 1.0):
        settings = {"max_new_tokens": 40, "temperature": temperature, "seed": 5, "eos": []}
        out = specjax.generate(loaded, asked, drafter=made, **settings)
        assert out.tokens == specjax.generate(loaded, asked, **settings).tokens
        assert out.stats.acceptance_rate is not None and out.exact


def test_the_default_shape_is_what_the_folder_asks_for():
    """speculators names a number of drafts, DeepSpec its training length; else the authors' tree
    of eight levels, ten branches and sixty nodes."""
    assert drafter("authors").proposer == DynamicTree(drafter("authors").source, 8, 10, 60)
    assert drafter("speculators").proposer == Chain(drafter("speculators").source, 3)
    assert drafter("DeepSpec").proposer == Chain(drafter("DeepSpec").source, 5)


@pytest.mark.parametrize("rule", specjax.RULES)
def test_every_rule_takes_a_chain(rule):
    """The exact rules keep the greedy text of a target whose drafter has a reduced vocabulary."""
    loaded, made = target("llama"), drafter("authors", Chain, num_drafts=DEPTH)
    asked = [prompts(3)[0].tolist()]
    settings = {"max_new_tokens": 20, "rule": rule, "temperature": 0.0, "eos": []}
    out = specjax.generate(loaded, asked, drafter=made, **settings)
    if specjax.RULES[rule].exact:
        assert out.tokens == specjax.generate(loaded, asked, max_new_tokens=20, eos=[]).tokens
    assert out.exact == specjax.RULES[rule].exact


@pytest.mark.parametrize("layout", ["authors", "speculators, one norm"])
def test_the_state_after_steps_is_that_of_a_fresh_prefill(layout, monkeypatch):
    """Also where prompts are read in chunks, and where a row was inserted: the next drafts depend
    on the text alone."""
    proposer = drafter(layout, Chain, num_drafts=DEPTH).proposer
    rule = Most()
    dec, arrays, state = begun(layout, proposer, rule, prompts(4), LENGTHS)
    step = jax.jit(dec.step)
    _, _, other = begun(layout, proposer, rule, prompts(5)[:1], LENGTHS[:1])
    for _ in range(4):
        state, _ = step(arrays, state)
    state = dec.insert(state, 1, other)
    for _ in range(3):
        state, _ = step(arrays, state)
    written = texts(state)
    _, info = step(arrays, state)
    monkeypatch.setattr(prefill, "CHUNK", 4)
    width = max(map(len, written))
    padded = np.array([text + [0] * (width - len(text)) for text in written], np.int32)
    lengths = np.array(list(map(len, written)), np.int32)
    # Another capacity, because compiled programs are found by the decoder.
    dec, arrays, fresh = begun(layout, proposer, rule, padded, lengths, CAPACITY + 1)
    _, again = jax.jit(dec.step)(arrays, fresh)
    assert info.proposal.tokens.tolist() == again.proposal.tokens.tolist()
    np.testing.assert_array_equal(fresh.length, state.length)


def test_a_row_of_one_token_drafts_nothing_in_its_first_step():
    """There is no feature yet; from the second step on there is."""
    proposer = drafter("authors", Chain, num_drafts=DEPTH).proposer
    ones = np.ones(ROWS, np.int32)
    dec, arrays, state = begun("authors", proposer, specjax.Match(), prompts(6)[:, :1], ones)
    step, counts = jax.jit(dec.step), []
    for _ in range(2):
        state, info = step(arrays, state)
        counts.append((np.asarray(info.proposal.parent)[:, 1:] >= 0).sum(1).tolist())
    assert counts == [[0] * ROWS, [DEPTH] * ROWS]


def test_the_targets_tables_are_not_copied():
    """The drafter's parameters hold the target's own embedding."""
    loaded, made = target("qwen3"), drafter("authors, shared")
    arrays = made.arrays(loaded)
    assert made.shares == ("embedding", "head")
    assert arrays.target["embedding"] is loaded.params["embedding"]
    assert set(arrays.own) == {"network"}
    assert drafter("authors, own tables").shares == ()
    assert drafter("authors, own tables").arrays(target("gemma2")).target == {}


def test_without_taps_the_target_returns_no_features():
    """The program that reads prompts, and the one that decodes, have features only if a proposer
    reads some."""
    loaded = target("llama")
    prompt, lengths = jnp.asarray(prompts()), jnp.asarray(LENGTHS)

    def outputs(taps):
        made = jax.make_jaxpr(
            lambda params: _read_prompts(
                loaded.model, ((64, 4), taps), (None, False), params, prompt, lengths
            )
        )(loaded.params)
        return len(made.out_avals), made

    plain, tapped = outputs(()), outputs((2, 3, 4))
    assert tapped[0] == plain[0] + 1
    sizes = [{aval.shape[-1] for aval in made.out_avals} for _, made in (plain, tapped)]
    assert sizes[1] - sizes[0] == {3 * eagle3_folders.SIZE}


def test_a_new_number_compiles_nothing():
    """Another temperature, limit or prompt of the same width runs the same programs."""
    loaded, made = target("llama"), drafter("authors", Chain, num_drafts=DEPTH)
    settings = {"drafter": made, "max_new_tokens": 8}
    specjax.generate(loaded, [[1, 2, 3]], temperature=0.5, **settings)
    before = counted.compilations()
    specjax.generate(loaded, [[7, 5, 9, 4]], temperature=0.7, seed=3, **settings)
    assert counted.compilations() == before
