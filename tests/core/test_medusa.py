"""Medusa: what heads read and draft, adapters per row, and the banks that hold them."""

import dataclasses

import counted
import jax
import jax.numpy as jnp
import language_models
import numpy as np
import pytest
from heads import HEAD, TINY, by_hand, random_heads
from toys import TABLES as toys

import specjax
from specjax import RULES, Medusa, MedusaBank, Sampling, tree, warp
from specjax.contract import Context
from specjax.methods import initial_medusa, medusa_logits
from specjax.methods.medusa.source import MedusaState
from specjax.sampling import IndependentDraw, SharedDraw
from specjax.types import ABSENT, Block


@pytest.mark.parametrize("heads", [toys.OWN, toys.SHARED], ids=["own", "shared"])
def test_heads_are_the_formula(heads):
    """Blocks and then a linear map, for any leading shape."""
    hidden = np.random.default_rng(0).normal(size=(2, 3, 32)).astype(np.float32)
    params = toys.noisy_heads(heads, 0)
    logits = medusa_logits(heads, heads.apply({"params": params}, hidden), HEAD)
    assert logits.shape == (2, 3, heads.num_heads, toys.VOCAB)
    np.testing.assert_allclose(logits, by_hand(heads, params, hidden), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("heads", [toys.OWN, toys.SHARED], ids=["own", "shared"])
def test_untrained_heads_say_what_the_target_says(heads):
    """Blocks of zeros are the identity, so hidden states and logits are those of the target."""
    out = toys.plain_output(toys.greedy_texts()[: toys.ROWS])
    logits = medusa_logits(
        heads, heads.apply({"params": initial_medusa(heads, HEAD)}, out.hidden), HEAD
    )
    for k in range(heads.num_heads):
        np.testing.assert_allclose(logits[:, :, k], out.logits, rtol=1e-5, atol=1e-5)


def test_a_softcap_of_the_target_holds_for_its_head():
    """If the target caps its logits, logits through its head are capped too."""
    heads = toys.SHARED.clone(logit_softcap=2.0)
    states = jnp.full((1, heads.num_heads, 32), 3.0)
    plain = medusa_logits(toys.SHARED, states, HEAD)
    np.testing.assert_allclose(
        medusa_logits(heads, states, HEAD), 2 * np.tanh(plain / 2), rtol=1e-5
    )


@pytest.mark.parametrize("shared", [True, False])
def test_the_proposal_is_the_best_tree_of_every_depth(shared):
    """Choice c below a node is the c-th best of its depth's warped logits + noise; absent nodes
    stay absent.

    Rows: sampled, greedy, filtered to fewer tokens than siblings, and without an adapter.
    """
    proposer, arrays = Medusa(toys.SHARED, toys.CHOICES), toys.medusa_params(own=False)
    rng = np.random.default_rng(1)
    hidden = jnp.array(rng.normal(size=(5, 32)), jnp.float32)
    adapter = jnp.array([0, 1, 0, -1, 0], jnp.int32)
    state = MedusaState(hidden, jnp.array([True, True, True, True, False]), adapter)
    settings = Sampling.create(5, [1.0, 0.0, 1.0, 1.0, 1.0], top_k=[0, 0, 2, 0, 0])
    pending, keys = jnp.arange(5, dtype=jnp.int32), toys.keys(5)

    @jax.jit
    def propose(keys):
        if shared:
            draw = SharedDraw.create(
                keys, jnp.full(5, 7), proposer.max_depth, toys.VOCAB, jnp.array(True)
            )
        else:
            draw = IndependentDraw.create(keys, jnp.full(5, 7), toys.VOCAB, proposer.num_nodes)
        node = jnp.arange(proposer.num_nodes)
        noise = jax.vmap(lambda d: d.noise(node, jnp.minimum(node, 2)))(draw)
        bank = [jax.tree.map(lambda leaf, a=a: leaf[a], arrays.bank) for a in range(2)]
        logits = [
            medusa_logits(toys.SHARED, toys.SHARED.apply({"params": b}, hidden), HEAD) for b in bank
        ]
        logits = jnp.where((adapter == 1)[:, None, None], logits[1], logits[0])
        context = Context(pending, draw, lambda x: warp(x, settings), shared, not shared, None)
        proposal = proposer.propose(arrays, state, context)[0]
        return proposal, noise, logits, warp(logits, settings)

    proposal, noise, logits, warped = jax.device_get(propose(keys))
    parent, choices = tree.from_choices(toys.CHOICES), [(), *proposer.choices]
    assert (proposal.parent[3:] == ABSENT).all()
    np.testing.assert_array_equal(proposal.parent[:3], np.broadcast_to(parent, (3, 7)))
    np.testing.assert_array_equal(proposal.tokens[:, 0], pending)
    for row in range(3):
        for node in range(1, 7):
            up, depth = int(parent[node]), len(choices[node]) - 1
            drawn = warped[row, depth] + noise[row, depth if shared else up]
            # Tokens that the warp excludes come last, the most probable first.
            rest = np.isinf(warped[row, depth])
            order = sorted(
                range(toys.VOCAB),
                key=lambda v: (rest[v], -(logits[row, depth, v] if rest[v] else drawn[v])),
            )
            assert proposal.tokens[row, node] == order[choices[node][-1]]
    if shared:
        assert proposal.logits is None
    else:
        for node in range(4):  # nodes with children, and others at their depth
            wanted = warped[:3, len(choices[node])]
            np.testing.assert_allclose(proposal.logits[:3, node], wanted, rtol=1e-4, atol=1e-4)


def test_the_state_holds_the_last_token_read():
    """It holds the hidden state of the last committed token; a row that commits nothing keeps
    its own."""
    proposer, arrays = Medusa(toys.SHARED), toys.medusa_params(own=False)
    hidden = jnp.arange(3 * 4 * 32, dtype=jnp.float32).reshape(3, 4, 32)
    tokens = jnp.zeros((3, 4), jnp.int32)
    state = proposer.start(arrays, Block(tokens, hidden, jnp.array([4, 2, 0])), 9)
    assert state.known.tolist() == [True, True, False]
    np.testing.assert_array_equal(state.hidden[:2], [hidden[0, 3], hidden[1, 1]])
    state = proposer.observe(arrays, state, Block(tokens, -hidden, jnp.array([0, 3, 1])))
    assert state.known.tolist() == [True, True, True]
    np.testing.assert_array_equal(state.hidden, [hidden[0, 3], -hidden[1, 2], -hidden[2, 0]])


# --- adapters per row -----------------------------------------------------------------------------

MIXED = [0, 1, -1, 1]


def run(rule, adapter, temperature=1.0):
    """Texts and figures of the prompts; all runs share the program of one adapter for all rows."""
    dec, arrays = toys.decoder("medusa tree", rule), toys.params("medusa tree")
    chosen = arrays.replace(proposer=arrays.proposer.replace(adapter=jnp.array(adapter, jnp.int32)))
    state = dec.run(arrays, toys.prefill(dec, chosen, temperature=temperature))
    return toys.texts(state), jax.device_get(state.stats)


@pytest.mark.parametrize("rule", toys.NOISE_KINDS)
def test_every_row_has_its_own_adapter(rule):
    """In a mixed batch each row has exactly the text and counts of a batch where all use its
    adapter."""
    texts, stats = run(rule, MIXED)
    alone = {adapter: run(rule, adapter) for adapter in set(MIXED)}
    assert texts == [alone[adapter][0][row] for row, adapter in enumerate(MIXED)]
    for name in ("target_passes", "emitted", "accepted", "tested", "proposed"):
        wanted = [getattr(alone[adapter][1], name)[row] for row, adapter in enumerate(MIXED)]
        assert getattr(stats, name).tolist() == wanted
    # The adapters differ, and the difference matters.
    passes = [alone[adapter][1].target_passes.tolist() for adapter in (0, 1)]
    assert passes[0] != passes[1]
    assert stats.proposed[2] == 0 < stats.proposed[0]


@pytest.mark.parametrize("rule", toys.NOISE_KINDS)
def test_a_row_without_an_adapter_decodes_plainly(rule):
    """Under either rule it has the text and the number of passes of plain decoding."""
    texts, stats = run(rule, MIXED)
    plain, state = toys.decoded("none", rule, 1.0)
    assert texts[2] == plain[2]
    assert stats.target_passes[2] == state.stats.target_passes[2]
    if RULES[rule].shared_noise:
        assert texts == plain


@pytest.mark.parametrize("rule", toys.NOISE_KINDS)
def test_an_inserted_row_brings_its_adapter(rule):
    """Inserted into a batch with another adapter, the row decodes as alone, and so do the
    others."""
    dec, arrays = toys.decoder("medusa tree", rule), toys.params("medusa tree")
    other = arrays.replace(proposer=arrays.proposer.replace(adapter=jnp.int32(1)))
    state = dec.run(arrays, toys.prefill(dec, arrays, temperature=1.0), 2)
    state = dec.run(
        arrays, dec.insert(state, 1, toys.prefill(dec, other, rows=[2], temperature=1.0))
    )
    (texts, stats), (alone, single) = run(rule, 0), run(rule, 1)
    assert toys.texts(state) == [texts[0], alone[2], texts[2], texts[3]]
    wanted = [stats.accepted[0], single.accepted[2], stats.accepted[2], stats.accepted[3]]
    assert state.stats.accepted.tolist() == wanted


def test_other_adapters_find_the_compiled_programs():
    """Another index, a row without an adapter and a newly added adapter compile nothing."""
    target = language_models.target()
    one, two, three = (language_models.heads(target, seed) for seed in range(3))
    bank = MedusaBank.create({"one": one, "two": two}, capacity=3)
    options = {"max_new_tokens": 12, "temperature": 1.0}

    def write(bank, adapter, **changes):
        return specjax.generate(
            target, ["the cat", "a dog"], adapter=adapter, proposer=bank, **options, **changes
        )

    first = write(bank, ["one", None])
    before = counted.compilations()
    bank = bank.add("three", three)
    outputs = [
        write(bank, adapter)
        for adapter in (["two", "one"], ["three", "three"], "three", [None, None])
    ]
    assert counted.compilations() == before
    assert {str(out.tokens) for out in outputs} == {str(first.tokens)}
    assert outputs[3].stats.tested == 0 < outputs[1].stats.tested
    alone = specjax.generate(target, ["the cat", "a dog"], proposer=three, **options)
    assert (alone.tokens, alone.stats.accepted) == (first.tokens, outputs[1].stats.accepted)


def test_rows_and_adapters_must_agree():
    """There is one adapter per row, or one for all."""
    arrays = toys.medusa_params(own=False).replace(adapter=jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="adapter has 3 values for 2 rows"):
        Medusa(toys.SHARED).start(
            arrays, Block(jnp.zeros((2, 1)), jnp.zeros((2, 1, 32)), jnp.ones(2, jnp.int32)), 9
        )


def test_a_bank_refuses_what_does_not_fit():
    """Duplicate names, a full bank, another form or target, too little room and an empty bank
    are refused."""
    target, other = specjax.load(TINY), specjax.load(TINY)
    other = dataclasses.replace(
        other, params={**other.params, "embedding": other.params["embedding"] + 0.5}, name="other"
    )
    one = random_heads(target, 0)
    bank = MedusaBank.create({"one": one}, capacity=2)
    with pytest.raises(ValueError, match="'one' already"):
        bank.add("one", one)
    with pytest.raises(ValueError, match=r"holds 2 of 2 adapters.*capacity=3"):
        bank.add("two", one).add("three", one)
    with pytest.raises(
        ValueError,
        match=r"'big' has other sizes.*2 heads of 3 blocks.*instead of 2 heads of 1 blocks",
    ):
        bank.add("big", random_heads(target, 0, num_layers=3))
    with pytest.raises(ValueError, match="'foreign' and 'one' were trained for different targets"):
        bank.add("foreign", random_heads(other, 0))
    with pytest.raises(ValueError, match="capacity=1, and there are 2"):
        MedusaBank.create({"one": one, "two": one}, capacity=1)
    with pytest.raises(ValueError, match="adapters is empty"):
        MedusaBank.create({})


def test_generate_refuses_adapters_that_do_not_fit():
    """Unknown names, a wrong count, no choice, no bank, heads without weights and another target
    are refused."""
    target, draft = specjax.load(TINY), specjax.load(TINY.parent / "draft")
    one, two = random_heads(target, 0), random_heads(target, 1)
    bank = MedusaBank.create({"one": one, "two": two})
    for message, options in {
        "no adapter 'three' in the bank; it has one, two": {"proposer": bank, "adapter": "three"},
        "adapter has 2 values for 1 prompts": {"proposer": bank, "adapter": ["one", "two"]},
        "several adapters: pass adapter= with one of one, two": {"proposer": bank},
        "adapter='one' needs a bank of adapters": {"adapter": "one"},
        "comes without its weights: pass what specjax.load_medusa": {"proposer": bank.proposer},
        "either draft= or proposer=": {"proposer": bank, "draft": draft},
    }.items():
        with pytest.raises(ValueError, match=message):
            specjax.generate(target, "x", **options)
    with pytest.raises(
        ValueError, match=r"heads 0 is for a target of hidden size 64.*draft has 32"
    ):
        specjax.generate(draft, "x", proposer=one)
    moved = dataclasses.replace(
        target,
        params={**target.params, "embedding": target.params["embedding"] + 0.5},
        name="moved",
    )
    with pytest.raises(ValueError, match="heads 0 was trained for another target than moved"):
        specjax.generate(moved, "x", proposer=one)
