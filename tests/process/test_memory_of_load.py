"""The memory that loading takes, measured in a process of its own."""

import memory_of_load
import pytest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_load(dtype):
    """Loading takes at most 1.2 times the memory of the weights in the dtype of loading."""
    cost = memory_of_load.measure(100 if dtype == "float32" else 200, [dtype])[dtype]
    assert cost["weights"] > 1.5e8
    assert cost["ratio"] < 1.2, cost
