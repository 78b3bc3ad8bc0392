"""New structure compiles and new numbers do not; a run is one device program and owns its state."""

import functools

import chex
import counted
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import TABLES as toys

import specjax
from specjax import RULES, Decoder, Sampling

PAIRS = (("draft 3", "match"), ("table static tree", "rejection"), ("adaptive", "match"))
"""A chain with a state, a tree, and a policy that chooses among programs."""


@pytest.fixture(scope="module", autouse=True)
def _nothing_compiled():
    """Clear JAX's traces: with thousands left by other files, a verb may hit one trace and miss
    the next."""
    jax.clear_caches()


OTHER = {
    "prompt": toys.PROMPTS[::-1] % 7,
    "prompt_length": np.array([2, 8, 1, 4], np.int32),
    "limit": np.array([30, 9, 17, 48], np.int32),
    "temperature": [0.0, 0.3, 2.0, 1.0],
    "top_k": [0, 3, 0, 9],
    "top_p": [1.0, 0.5, 0.9, 1.0],
    "min_p": [0.0, 0.0, 0.1, 0.5],
    "num_drafts": np.array([2, 0, 1, 9], np.int32),
}


def use(dec, arrays, *, slot, seed, steps, **changes):
    """Call every verb but `stream`, which is `run`."""
    changes = {"key": toys.keys(seed=seed)} | changes
    single = {
        name: v
        for name, v in changes.items()
        if name not in ("temperature", "top_k", "top_p", "min_p")
    }
    state = dec.run(arrays, toys.prefill(dec, arrays, **changes), steps)
    state = dec.insert(
        state,
        slot,
        toys.prefill(dec, arrays, rows=[slot], temperature=seed / 10, top_k=seed, **single),
    )
    return dec.run(arrays, state)


@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_numbers_do_not_trace(case, rule):
    """Other tokens, lengths, limits, settings, keys, slots and steps reuse every compiled
    program."""
    dec, arrays = toys.decoder(case, rule), toys.params(case)
    use(dec, arrays, slot=0, seed=1, steps=2)
    before = len(counted.traces())
    use(dec, arrays, slot=3, seed=5, steps=4, **OTHER)
    assert counted.traces(before) == []


def test_a_shape_does_trace():
    """The counter works: prompts padded to another width need another program."""
    dec, arrays = toys.decoder("none", "match"), toys.params("none")
    toys.prefill(dec, arrays)
    before = len(counted.traces())
    toys.prefill(dec, arrays, prompt=toys.PROMPTS[:, :7])
    assert counted.traces(before)


@pytest.mark.parametrize("rule", ["match", "typical"])
def test_equal_decoders_share_their_programs(rule):
    """Equal decoders are equal keys of the compilation cache, even if they are different
    objects."""
    arrays = toys.params("table chain")
    use(toys.decoder("table chain", rule), arrays, slot=0, seed=1, steps=2)
    again = toys.decoder("table chain", rule)
    assert again == toys.decoder("table chain", rule)
    before = len(counted.traces())
    use(again, arrays, slot=1, seed=2, steps=1)
    assert counted.traces(before) == []


NUMBERS = {
    "typical": (
        {"posterior_threshold": 0.01, "posterior_alpha": 0.05},
        {"posterior_threshold": 0.9, "posterior_alpha": 1},
    ),
    "threshold": ({"threshold": 0.02}, {"threshold": 0.95}),
}
"""Of every rule with numbers two settings, far apart."""


def test_every_rule_with_numbers_is_tried():
    """A rule has numbers if it has fields that are data."""
    assert set(NUMBERS) == {
        name for name, rule in RULES.items() if not jax.tree_util.all_leaves([rule()])
    }


@pytest.mark.parametrize("rule", NUMBERS)
def test_another_threshold_does_not_trace(rule):
    """Other thresholds, also per row, reuse all programs of the first; and the numbers matter."""
    arrays, proposer = toys.params("table chain"), toys.CASES["table chain"][0]

    def decoder(numbers):
        return Decoder(toys.model(), proposer, RULES[rule](**numbers), (toys.EOS,), toys.CAPACITY)

    def text(numbers):
        dec = decoder(numbers)
        return toys.texts(dec.run(arrays, toys.prefill(dec, arrays, temperature=1.0)))

    low, high = NUMBERS[rule]
    first = text(low)
    row = toys.prefill(decoder(low), arrays, rows=[1], temperature=1.0)
    decoder(low).insert(toys.prefill(decoder(low), arrays, temperature=1.0), 2, row)
    before = len(counted.traces())
    second = text(high)
    assert all(x != y for x, y in zip(first[:3], second[:3], strict=True))
    mixed = {name: np.array([low[name], high[name]] * 2, np.float32) for name in low}
    assert text(mixed) == [first[0], second[1], first[2], second[3]]
    # An inserted row keeps its own threshold.
    dec = decoder(low)
    state = dec.insert(
        toys.prefill(dec, arrays, temperature=1.0),
        2,
        toys.prefill(decoder(high), arrays, rows=[1], temperature=1.0),
    )
    assert toys.texts(dec.run(arrays, state)) == [first[0], first[1], second[1], first[3]]
    assert counted.traces(before) == []


def test_a_step_under_jit_traces_once():
    """User code that jits `step` itself compiles it once, whatever the numbers."""
    dec, arrays = toys.decoder("table chain", "match"), toys.params("table chain")
    step = jax.jit(chex.assert_max_traces(dec.step, n=1))
    for row, temperature in ((0, 0.0), (1, 0.7), (2, 1.0)):
        state = toys.prefill(dec, arrays, rows=[row], temperature=temperature, top_k=row)
        for _ in range(3):
            state, _ = step(arrays, state)


@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_a_run_moves_nothing_between_host_and_device(case, rule):
    """A whole run passes JAX's guard against implicit transfers."""
    dec, arrays = toys.decoder(case, rule), toys.params(case)
    state = toys.prefill(dec, arrays, temperature=1.0)
    steps = jnp.int32(100)
    with jax.transfer_guard("disallow"):
        state = dec.run(arrays, state, steps)
    assert state.done.all()


@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_a_step_calls_nothing_on_the_host(case, rule):
    """The program contains no callback, print or feed, so no backend needs the host."""
    dec, arrays = toys.decoder(case, rule), toys.params(case)
    program = str(jax.make_jaxpr(dec.step)(arrays, toys.prefill(dec, arrays)))
    assert "dot_general" in program
    for word in ("callback", "infeed", "outfeed", "debug_print", "device_put["):
        assert word not in program


def living(tree):
    return [not leaf.is_deleted() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_run_owns_its_state(case, rule):
    """Every leaf of the state that is passed in is donated."""
    dec, arrays = toys.decoder(case, rule), toys.params(case)
    state = toys.prefill(dec, arrays)
    result = dec.run(arrays, state)
    assert not any(living(state))
    assert all(living(result))
    assert all(living(arrays))


def test_insert_owns_the_batch_and_not_the_row():
    """The same row can be inserted into several batches."""
    dec, arrays = toys.decoder("draft 3", "match"), toys.params("draft 3")
    state, row = toys.prefill(dec, arrays), toys.prefill(dec, arrays, rows=[2])
    result = dec.insert(state, 0, row)
    assert not any(living(state))
    assert all(living(row))
    assert all(living(result))


@pytest.mark.parametrize("rule", ["match", "typical"])
def test_what_the_caller_gave_to_prefill_stays_the_callers(rule):
    """Donating a state does not delete the prompts, limits, settings and keys that it was made
    from."""
    dec, arrays = toys.decoder("table chain", rule), toys.params("table chain")
    prompt, length, limit = map(jnp.array, (toys.PROMPTS, toys.LENGTHS, toys.LIMITS))
    settings, keys = Sampling.create(toys.ROWS), toys.keys()
    first = toys.texts(
        dec.run(
            arrays, dec.prefill(arrays, prompt, length, limit=limit, sampling=settings, key=keys)
        )
    )
    assert all(living((prompt, length, limit, settings, keys)))
    again = toys.texts(
        dec.run(
            arrays, dec.prefill(arrays, prompt, length, limit=limit, sampling=settings, key=keys)
        )
    )
    assert first == again == toys.decoded("table chain", rule, 1.0)[0]


def test_layers_of_one_kind_are_traced_and_lowered_once():
    """A pass with three times the layers has as many products; its text is that of the layers one
    by one."""

    def of(layers: int):
        config = specjax.TransformerConfig(
            vocab_size=11, hidden_size=8, mlp_size=8, num_layers=layers, num_heads=2,
            num_kv_heads=1, head_dim=4, max_positions=16, windows=(2, None) * (layers // 2),
            init_scale=0.5,
        )  # fmt: skip
        return specjax.LinenModel(specjax.Transformer(config))

    def read(model, params):
        return model.apply(params, jnp.arange(6)[None], jnp.arange(6)[None]).logits

    few, many = of(2), of(6)
    params = many.init(jax.random.key(0))
    lowered = [jax.jit(functools.partial(read, m)).lower(params).as_text() for m in (few, many)]
    products = [text.count("stablehlo.dot_general") for text in lowered]
    assert products[0] == products[1] > 0
    found = jax.jit(functools.partial(read, many))(params)
    np.testing.assert_allclose(found, read(many, params), atol=1e-5)
