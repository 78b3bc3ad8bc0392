"""Compiled programs are freed when many others have been used since."""

from __future__ import annotations

import dataclasses
import gc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import TABLES as toys

import specjax
from specjax._internal import mappings, quick_code
from specjax._internal.jit_cache import Recent, clear_programs, keep_programs, programs
from specjax.decoding.decoder import _run
from specjax.decoding.prefill import _begin, _read_prompts
from specjax.generation.warmup import _compiled


@pytest.fixture(autouse=True)
def _none_before_and_all_kept_afterwards():
    clear_programs()
    yield
    keep_programs(None)


def living() -> int:
    """The programs of `_scale` in memory; those of other tests may go at any time."""
    gc.collect()
    there = jax.devices()[0].client.live_executables()
    return sum("_scale" in module.name for each in there for module in each.hlo_modules())


@programs(static=1, shape=lambda x: x.shape, donate=(1,))
def _scale(factor, x):
    """Multiplies."""
    return factor * x


def test_the_programs_used_last_are_kept():
    """Of 40 structures the last 8 are kept, a drop frees the program, and one that is used often
    is never compiled twice."""
    xs = [np.ones(4 + n % 2, np.float32) for n in range(40)]
    _scale(-1.0, xs[0])
    keep_programs(8)
    often, before = _scale._of((-1.0, xs[0])), living()
    for n, x in enumerate(xs):
        assert (np.asarray(_scale(float(n), x)) == n).all()
        _scale(-1.0, xs[0])
        assert _scale._of((-1.0, xs[0])) is often
    assert len(_scale.jitted()) == 8
    assert living() - before == 7  # beside the one that was there before
    assert [each._cache_size() for each in often.jitted] == [1] and _scale.__doc__ == "Multiplies."
    del often
    clear_programs()
    assert _scale.jitted() == [] and living() < before
    for most in (0, -1, "x", 2.5):
        with pytest.raises(ValueError, match=r"most=.* at least 1, or None for all"):
            keep_programs(most)


def test_a_program_that_an_engine_holds_is_freed_when_all_are():
    """It stays while others are used, and after `clear_programs` it is compiled again."""
    keep_programs(1)
    before, x = living(), np.ones(6, np.float32)
    held = _scale.bound(2.0, x)
    assert (np.asarray(held(x)) == 2).all()
    _scale(3.0, x)
    assert living() == before + 2
    clear_programs()
    assert living() <= before
    assert (np.asarray(held(x)) == 2).all() and len(_scale.jitted()) == 1


def test_generate_keeps_as_many_structures_as_it_is_told():
    """The programs of decoding are bounded; a structure that was dropped is compiled again, says
    so, and gives the same text."""
    target = specjax.LanguageModel(toys.model(), toys.weights(), None, (), "toy")
    clear_programs()
    keep_programs(2)

    def call(rows: int) -> specjax.Output:
        return specjax.generate(target, [[1, 2, 3]] * rows, max_new_tokens=4, proposer="none")

    first = {rows: call(rows) for rows in (1, 2, 3, 4)}
    assert all(output.stats.compile_seconds > 0 for output in first.values())
    assert [len(table.jitted()) for table in (_run, _begin, _read_prompts)] == [2, 2, 2]
    assert len(_compiled.values()) == 2
    again = call(4)
    assert again.stats.compile_seconds == 0 and again.tokens == first[4].tokens
    again = call(1)
    assert again.stats.compile_seconds > 0 and again.tokens == first[1].tokens


def test_a_table_of_recent_values():
    """The value that was used longest ago goes first."""
    table: Recent[str, int] = Recent()
    keep_programs(2)
    made = [table.get(name, lambda n=n: n) for n, name in enumerate("abac")]
    assert made == [0, 1, 0, 3] and "a" in table and "b" not in table


def test_programs_are_freed_before_memory_mappings_run_out(monkeypatch):
    """XLA crashes where Linux refuses a mapping, so half of the programs go at half of the limit;
    all stay if a user asked for that."""
    clear_programs()
    keep_programs(64)
    for n in range(6):
        _scale(float(n), np.ones(3, np.float32))
    assert 0 < mappings.mapped() < 0.5 and len(_scale.jitted()) == 6
    monkeypatch.setattr(mappings, "_most", lambda: 1)
    before = living()
    _scale(6.0, np.ones(3, np.float32))
    assert len(_scale.jitted()) == 4 and living() == before - 2
    _scale(6.0, np.ones(3, np.float32))  # known, so nothing goes
    assert len(_scale.jitted()) == 4
    keep_programs(None)
    _scale(7.0, np.ones(3, np.float32))
    assert len(_scale.jitted()) == 5


@dataclasses.dataclass
class _Spread:
    """What is asked of an array on several devices."""

    dtype: np.dtype
    of: types.SimpleNamespace

    @property
    def sharding(self):
        return self.of


@pytest.fixture
def _without_flags(monkeypatch):
    """XLA's own choice of a writer, which the flags of the tests name."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    quick_code._known.cache_clear()
    clear_programs()
    yield
    clear_programs()
    quick_code._known.cache_clear()


def test_programs_in_float32_are_written_the_quick_way(_without_flags, monkeypatch):
    """XLA gets the option for float32 alone, another one for arrays on several devices, and none
    where a trace has no place for it."""
    wide, narrow = np.ones(5, np.float32), jnp.ones(5, jnp.bfloat16)
    asked = quick_code.options((wide, np.ones(5, np.int8), None))
    assert asked is not None and list(asked.values()) == [False]
    assert quick_code.options((wide, narrow)) is None
    devices = types.SimpleNamespace(device_set={0, 1})
    assert quick_code.options((jnp.asarray(wide), jax.random.key(0), 1.5)) == asked
    spread = quick_code.options((jnp.asarray(wide), _Spread(wide.dtype, devices)))
    assert spread == {"xla_backend_optimization_level": 1}
    # XLA knows no such option, so an error shows that a program was compiled with it.
    monkeypatch.setattr(quick_code, "_known", lambda *_: {"xla_no_such_option": False})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        _scale(11.0, wide)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        _scale.bound(11.0, wide)(wide)
    assert (np.asarray(_scale(11.0, narrow), np.float32) == 11).all()
    assert (np.asarray(jax.jit(lambda x: _scale(12.0, x))(wide)) == 12).all()
    for factor in (13.0, 11.0):  # of the second one there is a program outside of traces
        assert (np.asarray(jax.jit(lambda factor=factor: _scale(factor, wide))()) == factor).all()
    monkeypatch.undo()  # also puts the flags back


def test_an_option_that_xla_or_the_user_refuses_is_left_out(_without_flags, monkeypatch):
    """A later XLA may not know it, and `XLA_FLAGS` may set it."""
    wide = np.ones(5, np.float32)
    monkeypatch.setenv("XLA_FLAGS", f"--{quick_code._QUICK[0]}=true")
    assert quick_code.options(wide) is None
    quick_code._known.cache_clear()
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(quick_code, "_QUICK", ("xla_no_such_option", False))
    assert quick_code.options(wide) is None
    assert (np.asarray(_scale(12.0, wide)) == 12).all()
