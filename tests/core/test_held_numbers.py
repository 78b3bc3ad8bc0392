"""Numbers that are on the device already are not put there again; traces leave none behind."""

import jax
import numpy as np
import pytest
from enumeration import enable_x64

from specjax._internal import held_numbers
from specjax._internal.held_numbers import on_device


@pytest.fixture(autouse=True)
def _nothing_held(monkeypatch):
    monkeypatch.setattr(held_numbers, "_held", type(held_numbers._held)())


def test_equal_numbers_are_one_array():
    """Only the value, the shape and the dtype count, and a deleted array is made again."""
    first = on_device(np.array([1.5, 2.0], np.float32))
    assert on_device(np.array([1.5, 2.0], np.float32)) is first
    others = (
        np.array([1.5, 2.5], np.float32),
        np.array([[1.5, 2.0]], np.float32),
        np.array([1.5, 2.0], np.float32).view(np.int32),
    )
    for other in others:
        made = on_device(other)
        assert made is not first and made.dtype == other.dtype
        assert (np.asarray(made) == other).all()
    first.delete()
    assert np.asarray(on_device(np.array([1.5, 2.0], np.float32))).tolist() == [1.5, 2.0]


def test_a_number_that_changes_later_changes_no_array():
    """JAX shares the memory of an array that begins at a multiple of 64 bytes."""
    room = np.zeros(32, np.float32)
    first = -room.ctypes.data % 64 // room.itemsize
    number = room[first : first + 3]
    number[:] = 1.0, 2.0, 3.0
    made = on_device(number)
    number[0] = 9.0
    assert np.asarray(made).tolist() == [1.0, 2.0, 3.0]


def test_another_default_device_has_arrays_of_its_own():
    number = np.array(5, np.int32)
    made = on_device(number)
    with jax.default_device(jax.devices()[-1]):
        other = on_device(number)
    assert other is not made and other.devices() == {jax.devices()[-1]}
    assert on_device(number) is made


def test_numbers_of_64_bits_are_those_of_the_setting():
    number = np.array([0.1], np.float64)
    short = on_device(number)
    with enable_x64(True):
        whole = on_device(number)
        assert whole.dtype == number.dtype and np.asarray(whole) == number
    assert short.dtype == np.float32 and on_device(number) is short


def test_few_are_held():
    kept = [on_device(np.array(n, np.int32)) for n in range(held_numbers._MOST + 1)]
    assert len(held_numbers._held) == held_numbers._MOST
    assert on_device(np.array(1, np.int32)) is kept[1]
    assert on_device(np.array(0, np.int32)) is not kept[0]  # the one used longest ago


def test_what_a_trace_makes_is_not_held():
    number = np.array(7, np.int32)
    assert int(jax.jit(lambda: on_device(number) + 1)()) == 8
    assert not any(isinstance(made, jax.core.Tracer) for made in held_numbers._held.values())
    assert int(on_device(number)) == 7
