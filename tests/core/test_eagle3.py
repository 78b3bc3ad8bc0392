"""EAGLE-3 heads in every published layout draft what a NumPy reference drafts, which has no cache.

The reference (`eagle3_reference.Reference`) reads the same files by their published names, and
computes everything again for every token.  The features of the target are random numbers here, so
no target is needed; `tests/product/test_eagle3_decoding.py` decodes.
"""

import types

import eagle3_folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle3_cases import CAPACITY, DEPTH, WIDTH, drafter, prompts, target
from eagle3_driven import Reference, asked, begun, check, driven, features, run
from started import started

from specjax import Chain, DynamicTree
from specjax.caches import prefill
from specjax.contract import Context, Lookahead
from specjax.methods.eagle3 import reader
from specjax.types import Block

AFTER = CAPACITY // 2


@pytest.mark.parametrize(
    "layout",
    [
        "authors", "authors, 3.1", "ModelOpt, two layers", "speculators", "speculators, one norm",
        "DeepSpec",
    ],
)  # fmt: skip
def test_drafts_are_those_of_the_reference(layout):
    """Every kind of file, and every norm; `tests/product` has the other layouts."""
    check(layout)


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
        state = started(source, params, block, CAPACITY, lookahead)
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


def test_the_default_shape_is_what_the_folder_asks_for(monkeypatch):
    """speculators names a number of drafts, DeepSpec its training length; else the authors' tree
    of eight levels, ten branches and sixty nodes, and on a CPU a short chain."""
    made = drafter("authors")
    assert made.proposer == Chain(made.source, 3)
    accelerator = types.SimpleNamespace(platform="tpu")
    monkeypatch.setattr(reader, "devices_of", lambda params: [accelerator])
    assert reader._shape({}, made.source, target("qwen3")) == DynamicTree(made.source, 8, 10, 60)
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
