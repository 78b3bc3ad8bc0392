"""Every test runs on the CPU in full precision; compiled programs are shared through `toys.py`.

The tests compile thousands of small programs once each, so optimising them would take longer than
everything else. With SPECJAX_TEST_DEFAULT_FLAGS=1 XLA optimises as it does for a user; `.ci/run`
tests the laws of decoding and a training that way.

Compiled programs are kept in `.pytest_cache/jax`, where other workers, processes and later runs
find them; `rm -r .pytest_cache` empties it.
"""

import gc
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ.get("SPECJAX_TEST_DEFAULT_FLAGS", "0") == "0":
    # Unoptimised code, emitters that compile in half the time, few memory mappings per program, and
    # no check of XLA's own passes after each of them.
    os.environ["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
        "--xla_cpu_parallel_codegen_split_count=1 --xla_disable_hlo_passes=hlo-verifier "
        + os.environ.get("XLA_FLAGS", "")
    )
# In the environment, so that the processes that tests start find the programs, too.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

import jax
import pytest
from tiers import pytest_addoption, pytest_configure  # noqa: F401 - hooks of pytest

import specjax

collect_ignore = ["process/gpu", "process/tpu"]  # see their conftest.py

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_default_matmul_precision", "float32")
specjax.keep_programs(None)  # tests that share a program are far from each other
# Traces allocate so many objects that collecting them as often as usual takes 5 % of the time.
gc.freeze()
gc.set_threshold(50_000, 20, 50)


@pytest.fixture(scope="module", autouse=True)
def _room_for_programs():
    """Drop programs before XLA crashes: each holds memory mappings, and Linux allows 65530."""
    yield
    mappings = pathlib.Path("/proc/self/maps")
    if mappings.exists() and len(mappings.read_text().splitlines()) > 20_000:
        jax.clear_caches()


@pytest.fixture(params=["tpu", "cuda"])
def elsewhere(request, monkeypatch):
    """Returns a function after which every choice falls as on another platform."""

    def choose(*operands, default, **forms):
        return forms.get(request.param, default)(*operands)

    def go():
        jax.clear_caches()
        monkeypatch.setattr(jax.lax, "platform_dependent", choose)

    yield go
    monkeypatch.undo()
    jax.clear_caches()
