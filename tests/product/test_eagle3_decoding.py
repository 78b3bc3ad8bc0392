"""Decoding with EAGLE-3 heads in every published layout drafts what a NumPy reference drafts.

The reference (`eagle3_reference.Reference`) reads the same files by their published names and the
target's hidden states from a plain pass, and computes everything again for every token.
`tests/core/test_eagle3.py` drives the heads without a target.
"""

import counted
import eagle3_folders
import eagle3_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle3_cases import (
    CAPACITY,
    DEPTH,
    LENGTHS,
    ROWS,
    Most,
    begun,
    drafter,
    prompts,
    target,
    texts,
)

import specjax
from specjax import Chain, DynamicTree, StaticTree
from specjax.caches import prefill
from specjax.decoding.prefill import _read_prompts


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

    By default the shape that the authors' folders ask for. `tests/core/test_laws_heads.py` has the
    laws over a table for a chain and a tree.
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
