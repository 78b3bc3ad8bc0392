"""EAGLE-3 heads in every published layout draft what a NumPy reference drafts, which has no cache.

The reference (`eagle3_reference.Reference`) reads the same files by their published names, and
computes everything again for every token.  The features of the target are random numbers here, so
no target is needed; `tests/product/test_eagle3_decoding.py` decodes.
"""

import functools

import eagle3_folders
import eagle3_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle3_cases import CAPACITY, DEPTH, LENGTHS, ROWS, WIDTH, drafter, prompts, target

from specjax import Chain, DynamicTree
from specjax.caches import prefill
from specjax.contract import Context, Lookahead
from specjax.types import Block

STEPS = ((3, 0, 1), (1, 3, 0), (0, 2, 3))
"""How many of its drafts each row accepts in a step."""
AFTER = CAPACITY // 2


class Reference(eagle3_reference.Reference):
    """The reference of a layout, whose features are given."""

    def __init__(self, layout, features):
        head, _, midlayer, kind = eagle3_folders.LAYOUTS[layout]
        super().__init__(head, head.tensors(1, midlayer), kind)
        self.given = features

    def features_of(self, tokens):
        return np.float64(self.given[: len(tokens)])


def features(layout, rows=ROWS):
    """[rows, CAPACITY, sum E] of any target."""
    size = eagle3_folders.SIZE * len(eagle3_folders.LAYOUTS[layout][0].taps)
    return np.random.default_rng(7).standard_normal((rows, CAPACITY, size), np.float32)


@functools.cache
def driven(proposer):
    """The functions of a proposer, compiled; they are called as a greedy decoder does."""

    def propose(params, state, pending):
        context = Greedy(pending, None, lambda logits, path: logits, True, False, None)
        return proposer.propose(params, state, context)

    init = jax.jit(lambda params, block: proposer.init(params, block, CAPACITY))
    return init, jax.jit(propose), jax.jit(proposer.observe)


class Greedy(Context):
    """Draws the most likely drafts."""

    def noise(self, node, depth):
        return jnp.zeros((len(self.pending), len(node), 1))


def begun(layout, proposer, texts, given, width=WIDTH):
    """The parameters and the state after texts, each without its last token."""
    loaded = target(eagle3_folders.LAYOUTS[layout][3])
    params = drafter(layout, Chain, num_drafts=DEPTH).arrays(loaded)
    tokens = np.zeros((len(texts), width), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text) - 1] = text[:-1]
    count = np.array([len(text) - 1 for text in texts], np.int32)
    block = Block(tokens, given[:, :width], count, given[:, :width])
    return params, driven(proposer)[0](params, block)


def committed(texts, new, given):
    """The block of what the target reads when `new` follows the texts: their last tokens, and all
    new ones but the last."""
    tokens = np.zeros((len(texts), DEPTH + 1), np.int32)
    rows = np.zeros((len(texts), DEPTH + 1, given.shape[-1]), np.float32)
    for row, (text, more) in enumerate(zip(texts, new, strict=True)):
        tokens[row, : len(more)] = [text[-1], *more[:-1]]
        rows[row] = given[row, len(text) - 1 :][: DEPTH + 1]
    count = np.array([len(more) for more in new], np.int32)
    return Block(tokens, rows, count, rows)


def run(layout, texts, given):
    """Texts after `STEPS`, the drafts of each step with the texts before it, and the last state."""
    proposer = drafter(layout, Chain, num_drafts=DEPTH).proposer
    _, propose, observe = driven(proposer)
    params, state = begun(layout, proposer, texts, given)
    seen = []
    for counts in (*STEPS, None):
        pending = np.array([text[-1] for text in texts], np.int32)
        proposal, state = propose(params, state, pending)
        drafts = np.asarray(proposal.tokens)[:, 1:].tolist()
        present = (np.asarray(proposal.parent)[:, 1:] >= 0).tolist()
        seen.append((texts, drafts, present))
        if counts is None:
            return texts, seen
        new = [[*row[:n], 1 + (7 * n + len(text)) % 300]
               for row, n, text in zip(drafts, counts, texts, strict=True)]  # fmt: skip
        state = observe(params, state, committed(texts, new, given))
        texts = [[*text, *more] for text, more in zip(texts, new, strict=True)]
    raise AssertionError


def asked(seed=0):
    return [row[:length].tolist() for row, length in zip(prompts(seed), LENGTHS, strict=True)]


@pytest.mark.parametrize("layout", eagle3_folders.LAYOUTS)
def test_drafts_are_those_of_the_reference(layout):
    """Over several blocks, of which rows accept none, some and all of their drafts."""
    given = features(layout)
    _, seen = run(layout, asked(), given)
    for before, drafts, present in seen:
        assert np.all(present)
        assert drafts == [
            Reference(layout, rows).drafts(text, DEPTH)
            for text, rows in zip(before, given, strict=True)
        ]


@pytest.mark.parametrize("layout", ["authors", "speculators, one norm"])
def test_the_state_after_steps_is_that_of_a_fresh_prompt(layout, monkeypatch):
    """Also where prompts are read in chunks: the next drafts depend on the text alone."""
    proposer, given = drafter(layout, Chain, num_drafts=DEPTH).proposer, features(layout)
    texts, seen = run(layout, asked(4), given)
    monkeypatch.setattr(prefill, "CHUNK", 4)
    params, state = begun(layout, proposer, texts, given, AFTER)
    pending = np.array([text[-1] for text in texts], np.int32)
    proposal, _ = driven(proposer)[1](params, state, pending)
    assert np.asarray(proposal.tokens)[:, 1:].tolist() == seen[-1][1]


def test_a_row_of_one_token_drafts_nothing_in_its_first_step():
    """There is no feature yet; from the second step on there is, and other rows have drafts."""
    given = features("authors")
    _, seen = run("authors", [asked(6)[0], [5], [9]], given)
    present = [[any(row) for row in rows] for _, _, rows in seen]
    assert present == [[True, False, False]] + 3 * [[True, True, True]]
    before, drafts, _ = seen[-1]
    assert drafts[1] == Reference("authors", given[1]).drafts(before[1], DEPTH)


@pytest.mark.parametrize("layout", ["authors, 3.1", "ModelOpt, two layers", "DeepSpec"])
def test_logits_are_those_of_the_reference(layout):
    """Along a chain and at every node of random trees, within 1e-4 of their spread."""
    loaded, given = target(eagle3_folders.LAYOUTS[layout][3]), features(layout, 1)
    reference = Reference(layout, given[0])
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

    found, length = read(params, given[:, :WIDTH])
    assert length.tolist() == [WIDTH - 1]  # the drafts are taken back
    paths = [(), *(_path(parent, tokens[0], n) for n in range(len(parent)))]
    for logits, path in zip(np.asarray(found), paths, strict=True):
        wanted = reference.logits(text, path)
        finite = np.isfinite(wanted)
        np.testing.assert_array_equal(np.isfinite(logits), finite)
        assert np.abs(logits[finite] - wanted[finite]).max() < 1e-4 * wanted[finite].std(), path


def _path(parent, tokens, node):
    return () if node < 0 else (*_path(parent, tokens, parent[node]), int(tokens[node]))


def test_the_default_shape_is_what_the_folder_asks_for():
    """speculators names a number of drafts, DeepSpec its training length; else the authors' tree
    of eight levels, ten branches and sixty nodes."""
    assert drafter("authors").proposer == DynamicTree(drafter("authors").source, 8, 10, 60)
    assert drafter("speculators").proposer == Chain(drafter("speculators").source, 3)
    assert drafter("DeepSpec").proposer == Chain(drafter("DeepSpec").source, 5)


def test_the_targets_tables_are_not_copied():
    """The drafter's parameters hold the target's own embedding."""
    loaded, made = target("qwen3"), drafter("authors, shared")
    arrays = made.arrays(loaded)
    assert made.shares == ("embedding", "head")
    assert arrays.target["embedding"] is loaded.params["embedding"]
    assert set(arrays.own) == {"network"}
    assert drafter("authors, own tables").shares == ()
    assert drafter("authors, own tables").arrays(target("gemma2")).target == {}
