"""Every test runs on the CPU, in full precision; compiled programs are shared through the toys of `toys.py`.

The tests compile some thousand small programs, once each: optimising them would take longer than all else.  What the
README's commands run in CI is optimised as usual, the auditor with its comparison of bits among it.
"""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# No optimisation; emitters that compile in half the time; few memory mappings a program (see below).
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
    + os.environ.get("XLA_FLAGS", "")
)

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_default_matmul_precision", "float32")


@pytest.fixture(scope="module", autouse=True)
def _room_for_programs():
    """Every compiled program holds memory mappings, of which Linux allows a process 65530: beyond them XLA crashes."""
    yield
    mappings = pathlib.Path("/proc/self/maps")
    if mappings.exists() and len(mappings.read_text().splitlines()) > 20_000:
        jax.clear_caches()
