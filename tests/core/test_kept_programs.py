"""Executables that a second process finds before it traces: what is in a key, and what is not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling
from specjax._internal import kept_programs
from specjax._internal.jit_cache import programs
from specjax._internal.kept_programs import Unknown, describe
from specjax.models.attention import attend, cpu_attend
from specjax.tuning import Learned, keep_costs, kept_costs, read_costs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Programs of this module are kept in an empty folder."""
    monkeypatch.setattr(kept_programs, "_folder", tmp_path)
    monkeypatch.setattr(kept_programs, "_KNOWN", (*kept_programs._KNOWN, __name__))
    monkeypatch.setattr(kept_programs, "_surroundings", lambda: "this machine")
    return tmp_path


def process(traced):
    """A function as a new process has it; `traced` grows when it is traced."""

    @programs(static=1, shape=lambda x: x.shape)
    def doubled(by, x):
        traced.append(x.shape)
        # A constant, so that JAX's own cache, which tests share, has no program of this text.
        return Sampling(x * by, x + np.random.default_rng().random(), x, x)

    return doubled


def files(folder, kind):
    return sorted(folder.glob(f"{kind}-*"))


def test_a_second_process_traces_nothing(folder):
    """And its results are the same, in the same structure; another shape or value is traced."""
    traced, x = [], jnp.arange(3.0)
    first, again = process(traced)(2, x), process(traced)
    second = again(2, x)
    assert traced == [(3,)]
    assert isinstance(second, Sampling)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    np.testing.assert_array_equal(again(3, x).temperature, [0, 3, 6])
    np.testing.assert_array_equal(again(2, jnp.arange(2.0)).temperature, [0, 2])
    np.testing.assert_array_equal(again(2, jnp.arange(3)).temperature, [0, 2, 4])
    assert traced == [(3,), (3,), (2,), (3,)]
    assert len(files(folder, "program")) == 4


def test_arrays_that_a_program_never_reads_are_part_of_its_key(folder):
    """The text of the program does not name them, and a call refuses others."""
    number = np.random.default_rng().random()

    def another_process():
        @programs(static=1, shape=lambda x, unread: x.shape)
        def added(by, x, unread):
            return x + by + number

        return added

    x = jnp.arange(3.0)
    for kind in 2 * (jnp.float32, jnp.bfloat16):
        made = another_process()(2, x, jnp.ones(4, kind))
        np.testing.assert_allclose(made, x + 2 + number, rtol=1e-6)


def test_a_traced_call_is_not_kept(folder):
    traced = []
    doubled = process(traced)
    for _ in range(2):
        assert jax.eval_shape(lambda x: doubled(2, x), jnp.ones(3)).top_k.shape == (3,)
    assert not files(folder, "program") and traced == [(3,)]
    doubled(2, jnp.ones(3))
    assert jax.eval_shape(lambda x: doubled(2, x), jnp.ones(3)).top_k.shape == (3,)


@pytest.mark.parametrize("kind", ["program", "code"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "empty"])
def test_a_damaged_file_costs_only_time(folder, kind, damage):
    traced, x = [], jnp.arange(3.0)
    process(traced)(2, x)
    (file,) = files(folder, kind)
    held = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        changed = held[:-1] + bytes([held[-1] ^ 1])
        file.write_bytes({"cut": held[:-9], "changed": changed, "empty": b""}[damage])
    np.testing.assert_array_equal(process(traced)(2, x).temperature, [0, 2, 4])
    assert len(traced) == 2
    process(traced)(2, x)
    assert len(traced) == 2, "the file is whole again"


def test_files_of_another_user_are_not_read(folder, monkeypatch):
    kept_programs.write(folder / "x", b"code")
    assert kept_programs.read(folder / "x") == b"code"
    monkeypatch.setattr(kept_programs.os, "getuid", lambda: -1)
    assert kept_programs.read(folder / "x") is None


def test_a_full_disk_keeps_nothing(folder, monkeypatch):
    """And no part of a file stays there."""

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(kept_programs.os, "replace", full)
    kept_programs.write(folder / "x", b"code")
    assert not list(folder.iterdir())


def test_source_that_changed_after_the_start_has_no_key(folder, monkeypatch):
    """What this process has imported may be older than the file."""
    assert kept_programs.place_of("program", 1) is not None
    compiled = jax.jit(lambda x: x).lower(1.0).compile()
    monkeypatch.setattr(kept_programs, "_BEGAN", 0.0)
    assert kept_programs.place_of("program", 1) is None
    with pytest.raises(Unknown, match="has changed"):
        kept_programs._keep(folder / "program-x", compiled, "a text", (), fresh=True)
    assert not list(folder.iterdir())


def test_what_another_cache_had_is_not_written(folder):
    """XLA:CPU would write it without some of its functions."""
    compiled = jax.jit(lambda x: x).lower(1.0).compile()
    kept_programs._keep(folder / "program-x", compiled, "a text", (), fresh=False)
    assert not list(folder.iterdir())


def test_functions_of_users_have_no_key(folder, monkeypatch):
    """They are called as always, and nothing is kept."""
    monkeypatch.setattr(kept_programs, "_KNOWN", ("specjax", "jax"))
    traced = []
    for _ in range(2):
        process(traced)(2, jnp.ones(3))
    assert len(traced) == 2 and not list(folder.iterdir())


@dataclasses.dataclass(frozen=True)
class Held:
    value: object


def test_keys_tell_values_apart(folder):
    values = [
        None, True, 1, 1.0, "1", b"1", -0.0, 0.0, (1,), [1], (1, (2,)), ((1, 2),), {1: 2}, {2: 1},
        frozenset({1}), Held(1), Held(2), Held(Held(1)), Held, np.dtype("int8"), np.int8(1),
        np.zeros(2), np.zeros((1, 2)), np.ones(2), attend, cpu_attend, functools.partial(attend),
        functools.partial(attend, scale=1.0), jax.ShapeDtypeStruct((2,), np.int8), range(1),
        jax.tree.structure((1, 2)), jax.tree.structure([1, 2]), jax.tree.structure((1, None)),
    ]  # fmt: skip
    keys = [repr(describe(value)) for value in values]
    assert len(set(keys)) == len(values)
    assert describe(frozenset("abc")) == describe(frozenset("cba"))


@pytest.mark.parametrize(
    "value", [lambda: 0, object(), jnp.ones(2), Held(lambda: 0), pytest.raises, (1, iter(()))]
)
def test_other_values_have_no_key(folder, value):
    with pytest.raises(Unknown):
        describe(value)
    assert kept_programs.place_of("program", value) is None


def test_a_function_that_was_replaced_has_no_key(folder, monkeypatch):
    before = attend
    monkeypatch.setattr("specjax.models.attention.attend", cpu_attend)
    with pytest.raises(Unknown):
        describe(before)


def test_settings_are_part_of_a_key(monkeypatch, tmp_path):
    """JAX's settings, the environment, the cores, and the source of specjax."""
    monkeypatch.setattr(kept_programs, "_folder", tmp_path)
    monkeypatch.setattr(jax, "devices", lambda: [None])
    found = [kept_programs.place_of("x", 1)]
    with monkeypatch.context() as patch:
        patch.setattr(kept_programs, "_settings", lambda: (("jax_enable_x64", "another"),))
        found.append(kept_programs.place_of("x", 1))
    with monkeypatch.context() as patch:
        patch.setattr(kept_programs, "_source", lambda: "another")
        found.append(kept_programs.place_of("x", 1))
        same = kept_programs.place_of("x", 1, traced=False)
    assert same == kept_programs.place_of("x", 1, traced=False)
    kept_programs._described.cache_clear()
    monkeypatch.setenv("XLA_FLAGS", "--another")
    found.append(kept_programs.place_of("x", 1))
    kept_programs._described.cache_clear()
    assert None not in found and len(set(found)) == 4
    monkeypatch.setattr(jax, "devices", lambda: [None, None])
    assert kept_programs.place_of("x", 1) is None


def test_costs_are_kept_for_a_day(folder, monkeypatch):
    learned = Learned(np.array([1.0, 2.0]), np.array([0.5, 0.7]), 3.0)
    assert read_costs("auto", 8) is None
    keep_costs(learned, "auto", 8)
    kept = read_costs("auto", 8)
    assert (
        kept is not None and kept.seconds.tolist() == [1, 2] and kept.prior.tolist() == [0.5, 0.7]
    )
    assert kept.spent == 0 and read_costs("auto", 4) is None
    now = kept_costs.time.time()
    monkeypatch.setattr(kept_costs.time, "time", lambda: now + kept_costs.KEPT_SECONDS + 1)
    assert read_costs("auto", 8) is None
