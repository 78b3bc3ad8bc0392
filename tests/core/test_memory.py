"""What cannot fit is refused with figures, before anything is compiled or allocated."""

import dataclasses
import math
import types

import folders
import jax
import numpy as np
import pytest
from naive_sources import drawn
from toy_models import transformer
from toys import TABLES as toys

import specjax
from specjax.cli import main
from specjax.parallel import memory


def nbytes(state):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def device(stats, platform="gpu"):
    return types.SimpleNamespace(platform=platform, memory_stats=lambda: stats, process_index=0)


@pytest.mark.parametrize("case", ["none", "draft 3", "medusa tree"])
def test_the_figure_is_what_a_state_takes(case, monkeypatch):
    """It also counts the logits of a step: with that much memory it runs, with a byte less it
    does not."""
    dec, arrays = toys.decoder(case, "match"), toys.params(case)
    logits = 4 * toys.ROWS * dec.proposer.num_nodes * toys.VOCAB
    size = nbytes(toys.prefill(dec, arrays)) + logits
    monkeypatch.setattr(memory, "free_bytes", lambda _: size)
    toys.prefill(dec, arrays)
    monkeypatch.setattr(memory, "free_bytes", lambda _: size - 1)
    with pytest.raises(
        ValueError, match=rf"4 rows with a capacity of 48 tokens would take {size / 1e3:.2f} kB"
    ):
        toys.prefill(dec, arrays)


def test_a_huge_capacity():
    """On the real machine, a figure that no machine has is refused at once."""
    config = dataclasses.replace(transformer().module.config, max_positions=2**30)
    model = specjax.LinenModel(specjax.Transformer(config))
    weights = drawn(jax.eval_shape(model.init, jax.random.key(0)), 0)
    dec = specjax.Decoder(model, specjax.NoProposer(), specjax.Match(), (), 10**9)
    with pytest.raises(
        ValueError, match=r"would take 1\.\d\d TB on .*: decode fewer rows .*bfloat16.*mesh="
    ):
        toys.prefill(dec, specjax.Params(weights))


def test_a_model_that_does_not_fit(monkeypatch, capsys):
    """Its weights are not read; the command prints the error and ends."""
    size = nbytes(specjax.load(folders.target()).params)
    monkeypatch.setattr(memory, "free_bytes", lambda _: size - 1)
    with pytest.raises(ValueError, match=r"the parameters in .* would take"):
        specjax.load(folders.target())
    with pytest.raises(SystemExit):
        main(["generate", "the", "--target", str(folders.target())])
    assert "are free: load it in bfloat16" in capsys.readouterr().err
    monkeypatch.setattr(memory, "free_bytes", lambda _: size)
    specjax.load(folders.target())


def test_what_a_device_says():
    """The limit less the memory in use; of several devices the smallest; unknown memory refuses
    nothing."""
    assert memory.free_bytes(device({"bytes_limit": 100, "bytes_in_use": 30})) == 70
    assert memory.free_bytes(device({"bytes_in_use": 30})) is None
    full, free = device({"bytes_limit": 100, "bytes_in_use": 90}), device({"bytes_limit": 100})
    memory.require(10, [full, free], "it", "")
    with pytest.raises(
        ValueError,
        match="it would take 11 bytes on each of 2 devices, of which 10 bytes are free: buy",
    ):
        memory.require(11, [full, free], "it", "buy one")
    memory.require(2**60, [device(None), device({})], "it", "")


def test_what_a_machine_says(tmp_path, monkeypatch):
    """CPU devices share the machine's memory; a container has the rest of its limit, with file
    caches."""
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CONTROL_GROUP", tmp_path)
    cpu = device(None, "cpu")
    assert memory.free_bytes(cpu) is None
    (tmp_path / "meminfo").write_text(
        "MemTotal: 900 kB\nMemAvailable: 300 kB\nHugePages_Total: 0\nSwapFree: 20 kB\n"
    )
    assert memory.free_bytes(cpu) == 320 * 1024
    (tmp_path / "memory.stat").write_text("anon 5\nactive_file 40\ninactive_file 60\n")
    for limit, free in (("max", 320 * 1024), ("5000", 4100), ("1000000", 320 * 1024)):
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text("1000\n")
        assert memory.free_bytes(cpu) == free
    memory.require(40 * 1024, [cpu] * 8, "it", "")
    with pytest.raises(ValueError, match=r"8 devices, of which 40\.96 kB are free"):
        memory.require(40 * 1024 + 1, [cpu] * 8, "it", "")


def test_the_second_look_is_at_what_garbage_leaves(monkeypatch):
    """Arrays in reference cycles are freed before anything is refused."""
    readings = iter([5.0, 50.0])
    monkeypatch.setattr(memory, "free_bytes", lambda _: next(readings))
    memory.require(20, [device(None)], "it", "")
    assert math.isinf(next(readings, math.inf))


def test_nothing_is_planned_where_prefill_is_traced(monkeypatch):
    """Under a user's own jit there is no device to ask."""
    monkeypatch.setattr(memory, "free_bytes", lambda _: 0)
    dec, arrays = toys.decoder("none", "match"), toys.params("none")
    state = jax.eval_shape(lambda: toys.prefill(dec, jax.tree.map(jax.numpy.asarray, arrays)))
    assert state.length.shape == np.shape(toys.LENGTHS)
