"""Programs over several devices are not in the cache that processes of tests share."""

import pathlib
import subprocess
import sys

import pytest
from several_devices import ROOT, environment

_SUM = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

mesh = jax.make_mesh((jax.device_count(),), ("data",))
jax.jit(jnp.sum)(jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("data"))))
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_no_program_over_several_devices_is_kept(tmp_path, monkeypatch, devices):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    subprocess.run([sys.executable, "-c", _SUM], env=environment(devices), check=True, cwd=ROOT)
    assert bool(list(tmp_path.iterdir())) == (devices == 1)


def test_processes_with_several_devices_are_started_so():
    """No test sets their number itself; scripts that do are started with these variables."""
    flag, here = "host_platform_device_" + "count=", pathlib.Path(__file__).parents[1]
    paths = [path for path in here.rglob("test_*.py") if path.parent.name not in ("gpu", "tpu")]
    assert len(paths) > 100
    assert [path.name for path in paths if flag in path.read_text()] == []
