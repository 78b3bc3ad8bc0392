"""Medusa: what heads see and guess, every row with heads of its own, and the best tree of choices."""

import dataclasses
import itertools
import json
import pathlib

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import toys

import specjax
from specjax import RULES, Medusa, MedusaAdapter, MedusaBank, Sampling, tree, warp
from specjax.models.medusa import initial_medusa, medusa_logits
from specjax.proposers.choices import expected_length, measure_ranks, node_acceptance
from specjax.proposers.medusa import MedusaState, best_tree
from specjax.sampling import IndependentDraw, SharedDraw
from specjax.types import ABSENT, Block

HEAD = toys.weights()["head"]["kernel"]
TINY = pathlib.Path(__file__).parent.parent / "checkpoints" / "tiny" / "target"


def by_hand(heads, params, hidden):
    """[..., K, V] in float64, written out head by head."""
    hidden, found = np.asarray(hidden, np.float64), []
    for k in range(heads.num_heads):
        x = hidden
        for layer in range(heads.num_layers):
            z = x @ np.asarray(params["kernel"][layer][k], np.float64) + np.asarray(params["bias"][layer][k])
            x = x + z / (1 + np.exp(-z))
        found.append(x @ np.asarray(params["head"][k] if heads.own_heads else HEAD, np.float64))
    return np.stack(found, axis=-2)


@pytest.mark.parametrize("heads", [toys.OWN, toys.SHARED], ids=["own", "shared"])
def test_heads_are_the_formula(heads):
    """Blocks, then a linear map, for any leading shape."""
    hidden = np.random.default_rng(0).normal(size=(2, 3, 32)).astype(np.float32)
    params = toys.noisy_heads(heads, 0)
    found = medusa_logits(heads, heads.apply({"params": params}, hidden), HEAD)
    assert found.shape == (2, 3, heads.num_heads, toys.VOCAB)
    np.testing.assert_allclose(found, by_hand(heads, params, hidden), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("heads", [toys.OWN, toys.SHARED], ids=["own", "shared"])
def test_untrained_heads_say_what_the_target_says(heads):
    """Blocks of zeros are the identity: the same features, the same logits."""
    out = toys.plain_output(toys.greedy_texts()[: toys.ROWS])
    found = medusa_logits(heads, heads.apply({"params": initial_medusa(heads, HEAD)}, out.hidden), HEAD)
    for k in range(heads.num_heads):
        np.testing.assert_allclose(found[:, :, k], out.logits, rtol=1e-5, atol=1e-5)


def test_a_softcap_of_the_target_holds_for_its_head():
    """Logits through the head of a target that caps them are capped."""
    heads = toys.SHARED.clone(logit_softcap=2.0)
    found = jnp.full((1, heads.num_heads, 32), 3.0)
    plain = medusa_logits(toys.SHARED, found, HEAD)
    np.testing.assert_allclose(medusa_logits(heads, found, HEAD), 2 * np.tanh(plain / 2), rtol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_the_proposal_is_the_best_tree_of_every_depth(shared):
    """Choice c below a node is the c-th best of its depth's logits + noise, warped; what is absent stays so.

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
            draw = SharedDraw.create(keys, jnp.full(5, 7), proposer.max_depth, toys.VOCAB, jnp.array(True))
        else:
            draw = IndependentDraw.create(keys, jnp.full(5, 7), toys.VOCAB)
        noise = jax.vmap(lambda d: jax.vmap(lambda n: d.noise(n, jnp.minimum(n, 2)))(jnp.arange(proposer.num_nodes)))
        bank = [jax.tree.map(lambda leaf, a=a: leaf[a], arrays.bank) for a in range(2)]
        logits = [medusa_logits(toys.SHARED, toys.SHARED.apply({"params": b}, hidden), HEAD) for b in bank]
        logits = jnp.where((adapter == 1)[:, None, None], logits[1], logits[0])
        found = proposer.propose(arrays, state, pending, draw, lambda x: warp(x, settings))[0]
        return found, noise(draw), logits, warp(logits, settings)

    found, noise, logits, warped = jax.device_get(propose(keys))
    parent, choices = tree.from_choices(toys.CHOICES), [(), *proposer.choices]
    assert (found.parent[3:] == ABSENT).all()
    np.testing.assert_array_equal(found.parent[:3], np.broadcast_to(parent, (3, 7)))
    np.testing.assert_array_equal(found.tokens[:, 0], pending)
    for row in range(3):
        for node in range(1, 7):
            up, depth = int(parent[node]), len(choices[node]) - 1
            drawn = warped[row, depth] + noise[row, depth if shared else up]
            # What the warp leaves out comes last, the most probable first.
            rest = np.isinf(warped[row, depth])
            order = sorted(
                range(toys.VOCAB), key=lambda v: (rest[v], -(logits[row, depth, v] if rest[v] else drawn[v]))
            )
            assert found.tokens[row, node] == order[choices[node][-1]]
    if shared:
        assert found.logits is None
    else:
        for node in range(4):  # those with children, and others at their depth
            wanted = warped[:3, len(choices[node])]
            np.testing.assert_allclose(found.logits[:3, node], wanted, rtol=1e-4, atol=1e-4)


def test_the_state_holds_the_last_token_read():
    """Features of the last committed token; a row without one, and one that commits nothing, keep what they had."""
    proposer, arrays = Medusa(toys.SHARED), toys.medusa_params(own=False)
    hidden = jnp.arange(3 * 4 * 32, dtype=jnp.float32).reshape(3, 4, 32)
    tokens = jnp.zeros((3, 4), jnp.int32)
    state = proposer.init(arrays, Block(tokens, hidden, jnp.array([4, 2, 0])), 9)
    assert state.known.tolist() == [True, True, False]
    np.testing.assert_array_equal(state.hidden[:2], [hidden[0, 3], hidden[1, 1]])
    state = proposer.observe(arrays, state, Block(tokens, -hidden, jnp.array([0, 3, 1])))
    assert state.known.tolist() == [True, True, True]
    np.testing.assert_array_equal(state.hidden, [hidden[0, 3], -hidden[1, 2], -hidden[2, 0]])


# --- adapters a row ---------------------------------------------------------------------------------------------------

MIXED = [0, 1, -1, 1]


def run(rule, adapter, temperature=1.0):
    """The texts and figures of the prompts; all runs share the program of one adapter for all rows."""
    dec, arrays = toys.decoder("medusa tree", rule), toys.params("medusa tree")
    chosen = arrays.replace(proposer=arrays.proposer.replace(adapter=jnp.array(adapter, jnp.int32)))
    state = dec.run(arrays, toys.prefill(dec, chosen, temperature=temperature))
    return toys.texts(state), jax.device_get(state.stats)


@pytest.mark.parametrize("rule", toys.NOISE_KINDS)
def test_every_row_has_its_own_adapter(rule):
    """In a mixed batch each row is, token for token and count for count, that row where all have its adapter."""
    texts, stats = run(rule, MIXED)
    alone = {adapter: run(rule, adapter) for adapter in set(MIXED)}
    assert texts == [alone[adapter][0][row] for row, adapter in enumerate(MIXED)]
    for name in ("target_passes", "emitted", "accepted", "tested", "proposed"):
        wanted = [getattr(alone[adapter][1], name)[row] for row, adapter in enumerate(MIXED)]
        assert getattr(stats, name).tolist() == wanted
    # Adapters differ, and they matter.
    assert alone[0][1].accepted.tolist() != alone[1][1].accepted.tolist()
    assert stats.proposed[2] == 0 < stats.proposed[0]


@pytest.mark.parametrize("rule", toys.NOISE_KINDS)
def test_a_row_without_an_adapter_decodes_plainly(rule):
    """Its text is that of no proposer, under either rule, and so is the number of passes."""
    texts, stats = run(rule, MIXED)
    plain, state = toys.decoded("none", rule, 1.0)
    assert texts[2] == plain[2]
    assert stats.target_passes[2] == state.stats.target_passes[2]
    if RULES[rule].shared_noise:
        assert texts == plain


@pytest.mark.parametrize("rule", toys.NOISE_KINDS)
def test_an_inserted_row_brings_its_adapter(rule):
    """Put into a batch of rows with another adapter, it decodes as alone, and so do they."""
    dec, arrays = toys.decoder("medusa tree", rule), toys.params("medusa tree")
    other = arrays.replace(proposer=arrays.proposer.replace(adapter=jnp.int32(1)))
    state = dec.run(arrays, toys.prefill(dec, arrays, temperature=1.0), 2)
    state = dec.run(arrays, dec.insert(state, 1, toys.prefill(dec, other, rows=[2], temperature=1.0)))
    (texts, stats), (alone, single) = run(rule, 0), run(rule, 1)
    assert toys.texts(state) == [texts[0], alone[2], texts[2], texts[3]]
    wanted = [stats.accepted[0], single.accepted[2], stats.accepted[2], stats.accepted[3]]
    assert state.stats.accepted.tolist() == wanted


def test_other_adapters_find_the_compiled_programs():
    """Another index, a row without one, and an adapter that has just been added: nothing is compiled."""
    target = specjax.load(TINY)
    one, two, three = (trained(target, seed) for seed in range(3))
    bank = MedusaBank.create({"one": one, "two": two}, capacity=3)
    options = {"max_new_tokens": 12, "temperature": 1.0}

    def write(bank, adapter, **changes):
        return specjax.generate(target, ["import ", "def "], adapter=adapter, proposer=bank, **options, **changes)

    first = write(bank, ["one", None])
    before = folders.compilations()
    bank = bank.add("three", three)
    outputs = [write(bank, adapter) for adapter in (["two", "one"], ["three", "three"], "three", [None, None])]
    assert folders.compilations() == before
    assert {str(out.tokens) for out in outputs} == {str(first.tokens)}
    assert outputs[3].stats.tested == 0 < outputs[1].stats.tested
    alone = specjax.generate(target, ["import ", "def "], proposer=three, **options)
    assert (alone.tokens, alone.stats.accepted) == (first.tokens, outputs[1].stats.accepted)


def trained(target, seed, **form):
    """Heads of a few random numbers."""
    adapter = MedusaAdapter.create(target, 2, name=f"heads {seed}", **form)
    keys = iter(jax.random.split(jax.random.key(seed), 9))
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(next(keys), leaf.shape), adapter.params)
    return dataclasses.replace(adapter, params=params, choices=((0,), (1,), (0, 0)))


# --- the best tree ----------------------------------------------------------------------------------------------------


def brute_force(ranks, num_nodes):
    """The most hits of any tree of at most so many nodes: every closed set of choices is tried."""
    depths, width = ranks.shape[1], int(ranks.max()) + 1
    paths = [path for d in range(depths) for path in itertools.product(range(width), repeat=d + 1)]
    hits = {path: int((ranks[:, : len(path)] == path).all(1).sum()) for path in paths}

    def closed(chosen):
        found = set(chosen)
        return all((len(c) == 1 or c[:-1] in found) and (c[-1] == 0 or (*c[:-1], c[-1] - 1) in found) for c in chosen)

    return max(
        sum(hits[c] for c in chosen)
        for size in range(num_nodes)
        for chosen in itertools.combinations(paths, size)
        if closed(chosen)
    )


@pytest.mark.parametrize("seed", range(6))
def test_no_tree_is_better(seed):
    """Against every tree, on ranks whose order and dependence are arbitrary, and on ranks that fall off."""
    rng = np.random.default_rng(seed)
    if seed % 2:
        joint = rng.dirichlet(np.full(9, 0.3)).reshape(3, 3)  # a worse sibling may be right more often
        picked = rng.choice(9, size=200, p=joint.ravel())
        ranks = np.stack([picked // 3, picked % 3], axis=1)
    else:
        ranks = np.minimum(rng.geometric(0.5, size=(200, 3)) - 1, 1)
    for num_nodes in range(2, 7):
        choices = best_tree(ranks, num_nodes)
        tree.from_choices(choices)
        assert len(choices) < num_nodes
        found = round((expected_length(ranks, choices) - 1) * len(ranks))
        assert found == brute_force(ranks, num_nodes)


def test_the_best_tree_is_measured_and_no_product_of_marginals():
    """Where the first guess is right exactly if the second head is wrong, no path (0, 0) is grown."""
    ranks = np.array([(0, 1), (1, 0)] * 10)
    assert best_tree(ranks, 6) == ((0,), (1,), (0, 0), (0, 1), (1, 0))
    assert best_tree(ranks, 5) == ((0,), (1,), (1, 0))
    assert expected_length(ranks, ((0,), (1,), (0, 0))) == 2.0
    assert node_acceptance(ranks, ((1,), (0,), (1, 0))).tolist() == [1, 0.5, 0.5, 1]


def test_the_best_tree_leaves_out_what_is_never_right():
    """More nodes than choices that were ever right are not filled up."""
    assert best_tree(np.array([[0, 0], [0, 5]]), 4) == ((0,), (0, 0))
    assert best_tree(np.array([[9]]), 4) == ()


def test_ranks_are_those_of_the_tokens_ahead():
    """Row t holds the ranks of the tokens at t + 2 + k by the logits at t, ties going to the lower id."""
    texts = toys.greedy_texts()[: toys.ROWS]
    params = toys.noisy_heads(toys.SHARED, 1)
    found = measure_ranks(toys.model(), toys.weights(), toys.SHARED, params, HEAD, texts)
    logits = by_hand(toys.SHARED, params, toys.plain_output(texts).hidden)
    places = toys.CAPACITY - 1 - toys.SHARED.num_heads
    assert found.shape == (toys.ROWS * places, toys.SHARED.num_heads)
    for row, t, k in itertools.product(range(toys.ROWS), (0, 1, places - 1), range(toys.SHARED.num_heads)):
        order = np.argsort(-logits[row, t, k], kind="stable").tolist()
        assert found[row * places + t, k] == order.index(texts[row, t + 2 + k])
    tied = jax.tree.map(jnp.zeros_like, params)
    found = measure_ranks(toys.model(), toys.weights(), toys.SHARED, tied, jnp.zeros_like(HEAD), texts)
    assert found[0].tolist() == texts[0, 2:4].tolist()


def test_ranks_measured_on_greedy_text_are_acceptance():
    """What the ranks promise of a chain on the target's own text is what decoding it gives."""
    texts = np.array(toys.decoded("none", "match")[0][:1])
    params = jax.tree.map(lambda leaf: leaf[0], toys.medusa_params(own=True).bank)
    ranks = measure_ranks(toys.model(), toys.weights(), toys.OWN, params, None, texts)
    dec, arrays = toys.decoder("medusa chain", "match"), toys.params("medusa chain")
    state, accepted = toys.prefill(dec, arrays), []
    while not state.done[0]:
        length = int(state.length[0])
        state = dec.run(arrays, state, 1)
        if length + 4 <= texts.shape[1]:  # not cut by the limit
            right = ranks[length - 2] == 0
            accepted.append((int(state.length[0]) - length - 1, int(np.cumprod(right).sum())))
    assert len(accepted) > 5
    assert all(found == wanted for found, wanted in accepted)
    assert len({found for found, _ in accepted}) > 1


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (((1, 0), (0,)), r"choice \(1, 0\) has no parent: add \(1,\)"),
        (((0,), (2,)), r"choice \(2,\) has no better sibling: add \(1,\)"),
        (((0,), (0, 0), (0, 0, 0)), r"\(0, 0, 0\) lies 3 tokens ahead, and there are 2 heads"),
        (tuple((n,) for n in range(toys.VOCAB + 1)), r"\(29,\) asks for more guesses than the vocabulary of 29"),
        (((0,), (-1,)), "-1"),
    ],
)
def test_bad_choices_are_refused(choices, message):
    """By name, with the cure."""
    with pytest.raises(ValueError, match=message):
        Medusa(toys.SHARED, choices)


def test_rows_and_adapters_must_agree():
    """One adapter a row, or one for all."""
    arrays = toys.medusa_params(own=False).replace(adapter=jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="adapter has 3 values for 2 rows"):
        Medusa(toys.SHARED).init(arrays, Block(jnp.zeros((2, 1)), jnp.zeros((2, 1, 32)), jnp.ones(2, jnp.int32)), 9)


@pytest.mark.parametrize(
    ("stats", "num_nodes", "message"),
    [
        (np.zeros((0, 2), int), 4, r"\[0, 2\].*measure_ranks"),
        (np.zeros(3, int), 4, r"\[3\].*measure_ranks"),
        (np.zeros((3, 2)), 4, "float64"),
        (np.full((3, 2), -1), 4, "whole numbers from 0"),
        (np.zeros((3, 2), int), 1, "num_nodes=1.*at least 2"),
    ],
)
def test_bad_statistics_are_refused(stats, num_nodes, message):
    """What they are, and what to pass."""
    with pytest.raises(ValueError, match=message):
        best_tree(stats, num_nodes)
    if num_nodes == 4 and stats.size:
        with pytest.raises(ValueError, match="texts of 3 tokens; 2 heads need 4"):
            measure_ranks(toys.model(), toys.weights(), toys.SHARED, None, HEAD, np.zeros((1, 3), int))


def test_a_bank_refuses_what_does_not_fit():
    """A name twice, no place, another form or target, too little room, and nothing at all."""
    target, other = specjax.load(TINY), specjax.load(TINY)
    other = dataclasses.replace(
        other, params={**other.params, "embedding": other.params["embedding"] + 0.5}, name="other"
    )
    one = trained(target, 0)
    bank = MedusaBank.create({"one": one}, capacity=2)
    with pytest.raises(ValueError, match="'one' already"):
        bank.add("one", one)
    with pytest.raises(ValueError, match=r"holds 2 of 2 adapters.*capacity=3"):
        bank.add("two", one).add("three", one)
    with pytest.raises(
        ValueError, match=r"'big' has another form.*2 heads of 3 blocks.*instead of 2 heads of 1 blocks"
    ):
        bank.add("big", trained(target, 0, num_layers=3))
    with pytest.raises(ValueError, match="'foreign' and 'one' were trained for different targets"):
        bank.add("foreign", trained(other, 0))
    with pytest.raises(ValueError, match="capacity=1, and there are 2"):
        MedusaBank.create({"one": one, "two": one}, capacity=1)
    with pytest.raises(ValueError, match="adapters is empty"):
        MedusaBank.create({})


def test_generate_refuses_adapters_that_do_not_fit():
    """An unknown name, a number of names, no choice, no bank, heads without weights, and another target."""
    target, draft = specjax.load(TINY), specjax.load(TINY.parent / "draft")
    one, two = trained(target, 0), trained(target, 1)
    bank = MedusaBank.create({"one": one, "two": two})
    for message, options in {
        "no adapter 'three' in the bank; it has one, two": {"proposer": bank, "adapter": "three"},
        "adapter has 2 values for 1 prompts": {"proposer": bank, "adapter": ["one", "two"]},
        "several adapters: pass adapter= with one of one, two": {"proposer": bank},
        "adapter='one' chooses from a bank": {"adapter": "one"},
        "comes without its weights: pass what specjax.load_medusa": {"proposer": bank.proposer},
        "either draft= or proposer=": {"proposer": bank, "draft": draft},
    }.items():
        with pytest.raises(ValueError, match=message):
            specjax.generate(target, "x", **options)
    with pytest.raises(ValueError, match=r"heads 0 is for a target of 64 features.*draft has 32"):
        specjax.generate(draft, "x", proposer=one)
    moved = dataclasses.replace(
        target, params={**target.params, "embedding": target.params["embedding"] + 0.5}, name="moved"
    )
    with pytest.raises(ValueError, match="heads 0 was trained for another target than moved"):
        specjax.generate(moved, "x", proposer=one)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_heads", [False, True])
def test_heads_come_back_from_their_folder(tmp_path, own_heads):
    """The same numbers, tree and figures; the names, shapes and orientation are those of the authors' files."""
    target = specjax.load(TINY)
    adapter = trained(target, 0, num_layers=2, own_heads=own_heads)
    adapter = dataclasses.replace(adapter, acceptance=(0.5, 0.25, 0.75))
    specjax.save_medusa(tmp_path, adapter, "tiny/target")
    found = specjax.load_medusa(tmp_path, target)
    jax.tree.map(np.testing.assert_array_equal, found.params, adapter.params)
    assert (found.heads, found.choices, found.acceptance) == (adapter.heads, adapter.choices, adapter.acceptance)
    stored = safetensors.numpy.load_file(tmp_path / "medusa_lm_head.safetensors")
    names = {f"{k}.{n}.linear.{part}" for k in range(2) for n in range(2) for part in ("weight", "bias")}
    assert set(stored) == names | ({"0.2.weight", "1.2.weight"} if own_heads else set())
    np.testing.assert_array_equal(stored["1.0.linear.weight"], adapter.params["kernel"][0, 1].T)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (2, 2)
    assert config["base_model_name_or_path"] == "tiny/target"
    assert config.get("version") == (None if own_heads else "2")


def test_rounded_heads_are_half_as_large(tmp_path):
    """In bfloat16, as training saves them."""
    adapter = trained(specjax.load(TINY), 0)
    for dtype in (None, jnp.bfloat16):
        specjax.save_medusa(tmp_path / str(dtype), adapter, "t", dtype)
    sizes = [(tmp_path / str(d) / "medusa_lm_head.safetensors").stat().st_size for d in (None, jnp.bfloat16)]
    assert 1.8 < sizes[0] / sizes[1] < 2.1
    found = specjax.load_medusa(tmp_path / str(jnp.bfloat16), specjax.load(TINY))
    np.testing.assert_allclose(found.params["kernel"], adapter.params["kernel"], rtol=0.01, atol=1e-4)


def spoil(folder, change):
    """Change the tensors or the configuration of a folder."""
    path, config = folder / "medusa_lm_head.safetensors", folder / "config.json"
    tensors = safetensors.numpy.load_file(path)
    settings = json.loads(config.read_text())
    change(tensors, settings)
    safetensors.numpy.save_file(tensors, path)
    config.write_text(json.dumps(settings))


SPOILED = {
    "a tensor is missing": (lambda t, c: t.pop("1.0.linear.bias"), r"1\.0\.linear\.bias is missing \(shape \[64\]\)"),
    "another shape": (
        lambda t, c: t.update({"0.0.linear.bias": np.zeros(3, np.float32)}),
        r"bias has shape \[3\] instead of \[64\]",
    ),
    "too many": (lambda t, c: t.update({"7.0.x": np.zeros(3, np.float32)}), r"7\.0\.x is not a tensor of such heads"),
    "integers": (
        lambda t, c: t.update({"0.0.linear.bias": np.zeros(64, np.int32)}),
        "stored as I32; specjax reads",
    ),
    "more heads": (lambda t, c: c.update(medusa_num_heads=3), r"2\.0\.linear\.weight is missing"),
    "no heads": (lambda t, c: c.update(medusa_num_heads=0), "medusa_num_heads is 0"),
    "no number": (lambda t, c: c.pop("medusa_num_layers"), "lacks 'medusa_num_layers'"),
    "version": (lambda t, c: c.update(version="3"), "version is '3'; specjax reads 1 and 2"),
    "version 1": (lambda t, c: c.pop("version"), r"0\.1\.weight is missing \(shape \[512, 64\]\)"),
    "choices": (lambda t, c: c["specjax"].update(choices=[[1]]), r"config\.json: choice \(1,\) has no better sibling"),
    "acceptance": (lambda t, c: c["specjax"].update(acceptance=[0.5]), "acceptance has 1 values"),
    "no text": (lambda t, c: c.update(medusa_num_heads="x"), "no configuration of Medusa heads"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_folder_that_does_not_fit_is_refused(tmp_path, case):
    """The file, what is wrong with it, and what it should be."""
    change, message = SPOILED[case]
    target = specjax.load(TINY)
    specjax.save_medusa(tmp_path, trained(target, 0), "t")
    spoil(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        specjax.load_medusa(tmp_path, target)


def test_a_folder_that_is_none_is_refused(tmp_path):
    """No folder, no file, damage, and pickles, which are never read."""
    target = specjax.load(TINY)
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        specjax.load_medusa(tmp_path / "nowhere", target)
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        specjax.load_medusa(tmp_path, target)
    specjax.save_medusa(tmp_path, trained(target, 0), "t")
    weights = tmp_path / "medusa_lm_head.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged or truncated"):
        specjax.load_medusa(tmp_path, target)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="holds no medusa_lm_head"):
        specjax.load_medusa(tmp_path, target)
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"\x80")
    with pytest.raises(ValueError, match="pickled weights"):
        specjax.load_medusa(tmp_path, target)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="no configuration of Medusa heads"):
        specjax.load_medusa(tmp_path, target)
