"""Checkpoints are written beside the run: what a step overwrites meanwhile is not in them."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training import checkpoints
from specjax.training.checkpoints import Checkpoints, saved_steps

overwrite = jax.jit(lambda x: x - 1e9, donate_argnums=0)


def test_a_step_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """`save` returns before the files are hashed; the state that it was given may be overwritten;
    the next `save` waits for the one before."""
    gate, hashed = threading.Event(), checkpoints._facts

    def facts(folder):
        assert gate.wait(30)
        return hashed(folder)

    monkeypatch.setattr(checkpoints, "_facts", facts)
    values = {step: np.arange(1 << 20, dtype=np.float32) + step for step in (1, 2)}
    made = Checkpoints(tmp_path)
    for step, numbers in values.items():
        state = jnp.asarray(numbers)
        made.save(step, {"x": state})
        assert not (tmp_path / "state" / str(step) / "sha256.json").exists() or step == 2
        for _ in range(5):
            state = overwrite(state)
        gate.set()
    made.close()
    assert saved_steps(tmp_path) == [1, 2]
    for step in (2, 1):
        again = Checkpoints(tmp_path)
        assert again.step == step
        restored = again.restore({"x": jnp.zeros(1 << 20)})
        np.testing.assert_array_equal(restored["x"], values[step])
        again.close()
        (tmp_path / "state" / str(step) / "sha256.json").write_text("{}")


def test_a_write_that_fails_beside_the_run(tmp_path, monkeypatch):
    """The next call raises, and names the checkpoint that is intact."""
    made = Checkpoints(tmp_path)
    made.save(1, {"x": jnp.ones(3)})
    made.wait()

    def full(folder):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoints, "_facts", full)
    made.save(2, {"x": jnp.ones(3)})
    with pytest.raises(OSError, match=r"step 2 could not .*no space left\n.*\(step 1\) is intact"):
        made.save(3, {"x": jnp.ones(3)})
    made.close()
    assert Checkpoints(tmp_path).step == 1
