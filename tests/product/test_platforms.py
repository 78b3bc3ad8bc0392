"""The forms of other platforms, run on this one: they compute what the form for a CPU computes."""

import functools

import counted
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import transformer
from toys import TABLES as toys

import specjax
from specjax import sampling
from specjax._internal import cuda_graphs, platforms
from specjax.caches import KVCache, stage
from specjax.models import LinenModel, quantise
from specjax.models.layers import look_up
from specjax.models.products import dot_general, float32_dot_general

pytestmark = pytest.mark.xdist_group("platforms")  # a share takes all of them, or none


def test_a_choice_is_made_where_a_program_is_lowered():
    """Not by the default platform of the process: the same trace is lowered for two platforms."""
    traced = jax.jit(lambda x: platforms.on_cpu(jnp.sin, jnp.cos, x)).trace(jnp.ones(()))
    for platform, has, lacks in (("cpu", "sine", "cosine"), ("tpu", "cosine", "sine ")):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert f"stablehlo.{has}" in text and f"stablehlo.{lacks}" not in text


def test_the_default_platform_is_that_of_arrays():
    assert platforms.default_platform() == "cpu"


@pytest.mark.parametrize(("case", "rule"), [("table dynamic tree", "match")])
def test_texts_are_the_same_in_every_form(case, rule, elsewhere):
    """Greedy and sampled, by the same programs."""
    wanted = [toys.decoded(case, rule, temperature)[0] for temperature in (0.0, 1.0)]
    elsewhere()
    decoder, params = toys.decoder(case, rule), toys.params(case)
    for temperature, texts in zip((0.0, 1.0), wanted, strict=True):
        state = toys.prefill(decoder, params, temperature=temperature)
        assert toys.texts(decoder.run(params, state)) == texts


def test_the_greatest_values(elsewhere):
    """With ties, in the order of the indices, and distinct even if all others are excluded."""
    x = np.round(np.random.default_rng(0).normal(size=(3, 5, 40)), 1).astype(np.float32)
    x[0, 0], x[1, 1, 3:] = -np.inf, -np.inf
    order = np.argsort(-x, axis=-1, kind="stable")
    elsewhere()
    counts = (0, 1, 3, 16, 17)
    found = jax.jit(lambda x: [sampling.top_k(x, count) for count in counts])(x)
    for count, (values, indices) in zip(counts, found, strict=True):
        np.testing.assert_array_equal(indices, order[..., :count])
        np.testing.assert_array_equal(values, np.take_along_axis(x, order[..., :count], -1))


def test_an_argmax_is_the_first(elsewhere):
    x = np.round(np.random.default_rng(0).normal(size=(4, 5, 40)))
    elsewhere()
    np.testing.assert_array_equal(jax.jit(lambda x: sampling.argmax(x))(x), x.argmax(-1))


def test_shared_noise_is_the_same_bits(elsewhere):
    draw = sampling.SharedDraw(jax.random.gumbel(sampling.make_key(0), (4, 30)))
    depth = jnp.array([0, 2, 1, 3, 3, 0])
    elsewhere()
    np.testing.assert_array_equal(draw.noise(depth, depth), draw.gumbel[depth])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_cache_stages_the_same_tokens(dtype, elsewhere):
    """Committed slots and those of the new tokens; what is after them is never read."""
    rng = np.random.default_rng(0)
    shapes = [(rows, width) for rows in (1, 4, 20) for width in (1, 3)]
    lengths = [rng.integers(0, 9 - width, rows) for rows, width in shapes]
    new = [rng.normal(size=(rows, 2, width, 4)).astype(dtype) for rows, width in shapes]

    def staged():
        def both(length, new):
            cache = KVCache.zeros(1, len(length), 2, 9, 4, dtype).commit(length)
            return cache.stage(new, new)[0], stage(cache.keys[0], new, cache.length)

        def each(lengths, news):
            return [both(*given) for given in zip(lengths, news, strict=True)]

        return jax.device_get(jax.jit(each)(lengths, new))

    wanted = staged()
    elsewhere()
    found = staged()
    for (_, width), length, (keys, plain), (right, _) in zip(
        shapes, lengths, found, wanted, strict=True
    ):
        for row, end in enumerate(length + width):
            np.testing.assert_array_equal(keys[row, :, :end], right[row, :, :end])
            np.testing.assert_array_equal(plain[row, :, :end], right[row, :, :end])


@pytest.mark.parametrize("rows", [1, 3])
def test_products_in_bfloat16(rows, elsewhere):
    """Sums are float32 in both forms, and their order may differ."""
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((2, rows, 8), (8, 6)))
    turned = jnp.asarray(rng.normal(size=(2, 7, 8)), jnp.bfloat16)
    batched = (((2,), (2,)), ((0,), (0,)))

    def products():
        def both(x, kernel, turned):
            flat = dot_general(x, kernel, (((2,), (0,)), ((), ())))
            return flat.astype(jnp.float32), float32_dot_general(x, turned, batched)

        return jax.jit(both)(x, kernel, turned)

    wanted = products()
    elsewhere()
    for ours, theirs in zip(products(), wanted, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("count", [1, 4, 40])
def test_rows_of_a_table(elsewhere, count, dtype):
    """Few are looked up one by one; an id outside the table gets the row nearest to it."""
    rng = np.random.default_rng(0)
    table, ids = jnp.asarray(rng.normal(size=(9, 4)), dtype), rng.integers(-2, 11, (2, count))
    elsewhere()
    found = jax.jit(lambda table, ids: look_up(table, ids))(table, jnp.asarray(ids))
    np.testing.assert_array_equal(found, np.asarray(table)[np.clip(ids, 0, 8)])


@functools.cache
def in_int8():
    small = transformer(num_layers=1)
    return quantise(specjax.LanguageModel(small, small.init(jax.random.key(0)), name="toy"))


def test_a_model_in_int8(elsewhere):
    """Sums of integers are exact, so every form gives the same logits, also for a single row."""
    model = in_int8()

    def logits():
        read, tokens = jax.jit(model.model.apply), jnp.array([[1, 2, 3]])
        return [
            read(model.params, part, jnp.arange(part.shape[1])[None]).logits
            for part in (tokens, tokens[:, :1])
        ]

    wanted = logits()
    elsewhere()
    for ours, theirs in zip(logits(), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_default_device_is_obeyed():
    """`jax.default_device` names it without an array; nothing is compiled to find out."""
    before = counted.compilations()
    with jax.default_device(jax.devices("cpu")[0]):
        assert platforms.default_platform() == "cpu"
    assert counted.compilations() == before


def test_a_program_is_lowered_for_a_platform_that_is_absent():
    """ "gpu" is CUDA where there is no GPU, and the program has the form of other platforms than
    the CPU."""
    decoder, params = toys.decoder("none", "match"), toys.params("none")
    text = decoder.lower(params, toys.prefill(decoder, params), "gpu").as_text()
    assert text == decoder.lower(params, toys.prefill(decoder, params), "cuda").as_text()
    assert text != decoder.lower(params, toys.prefill(decoder, params)).as_text()


def test_the_names_of_platforms():
    """JAX would lower a program for any name, and name no platform that it has."""
    assert platforms.lowering_platforms(None) is None
    for name in platforms.PLATFORMS:
        assert platforms.lowering_platforms(name) == ("cuda" if name == "gpu" else name,)
    for name in ("metal", "GPU", "", 3):
        with pytest.raises(ValueError, match="pass one of cpu, gpu, cuda, rocm, tpu"):
            platforms.lowering_platforms(name)


class _Gpu:
    platform, process_index = "gpu", 0

    def memory_stats(self):
        return None


@pytest.mark.parametrize(
    ("flags", "version", "told"),
    [
        ("--xla_gpu_enable_command_buffer=+WHILE", 12020, True),
        ("--xla_gpu_enable_command_buffer=+WHILE", 12030, False),
        ("--xla_gpu_enable_command_buffer=+WHILE", None, False),
        ("--xla_gpu_enable_command_buffer=FUSION", 12020, False),
    ],
)
def test_a_driver_without_loops_in_graphs_is_told(flags, version, told, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(cuda_graphs, "driver_version", lambda: version)
    cuda_graphs.check_graphs(jax.devices())  # a CPU has no graphs
    if told:
        with pytest.raises(ValueError, match=r"CUDA 12\.2.*install a driver of CUDA 12\.3"):
            cuda_graphs.check_graphs([_Gpu()])
    else:
        cuda_graphs.check_graphs([_Gpu()])
    monkeypatch.undo()
    assert cuda_graphs.driver_version() is None or cuda_graphs.driver_version() > 0


def test_shapes_of_a_cache_are_those_of_the_platform():
    """A GPU's cache has a multiple of 128 slots, also where it is shaped without a GPU."""
    assert KVCache.zeros(1, 1, 1, 200, 4, jnp.float32).capacity == 201
    with platforms.shapes_for("gpu"):
        assert KVCache.zeros(1, 1, 1, 200, 4, jnp.float32).capacity == 256
        assert KVCache.zeros(1, 1, 1, 127, 4, jnp.float32).capacity == 128


def test_a_token_alone_is_read_beside_a_second_one():
    """For a GPU, and no one sees it: not the shapes, the logits, the length, nor later tokens."""
    model, tokens = transformer(num_layers=1), jnp.array([[3, 1, 4]])
    params = model.init(jax.random.key(0))
    wanted = model.apply(params, tokens, jnp.arange(3)[None], taps=(1,))
    multiplied = []

    def product(x, kernel, dimensions):
        multiplied.append(x.shape[:-1])
        return dot_general(x, kernel, dimensions)

    with platforms.shapes_for("gpu"):
        watched = LinenModel(model.module.clone(dot_general=product), model.dtype)
        read = jax.jit(functools.partial(watched.apply, taps=(1,)))
        cache = watched.init_cache(1, 3)
        for n in range(3):
            seen = jnp.ones((1, 1, 1), bool)
            out = read(params, tokens[:, n : n + 1], jnp.array([[n]]), cache, seen)
            assert out.cache.length == n
            cache = out.cache.commit(jnp.ones(1, jnp.int32))
            for part in ("logits", "hidden", "features"):
                ours, theirs = getattr(out, part), getattr(wanted, part)[:, n : n + 1]
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert set(multiplied) == {(1, 2)}


@pytest.mark.parametrize("case", ["draft 3", "ngram"])
def test_one_pass_in_the_place_of_loops_gives_the_same_texts(case):
    """For a GPU a draft model reads all unread tokens, and the target all nodes, without loops."""
    wanted = toys.decoded(case, "match", 1.0)[0]
    decoder, params = toys.decoder(case, "match"), toys.params(case)

    def loops(state):
        # Lowered for one platform, since a CPU draws noise with a loop only without our kernel.
        return decoder.lower(params, state, "gpu").as_text().count("stablehlo.while")

    elsewhere = loops(toys.prefill(decoder, params, temperature=1.0))
    jax.clear_caches()
    specjax.clear_programs()
    with platforms.shapes_for("gpu"):
        state = toys.prefill(decoder, params, temperature=1.0)
        assert loops(state) < elsewhere
        assert toys.texts(decoder.run(params, state)) == wanted
    jax.clear_caches()
    specjax.clear_programs()
