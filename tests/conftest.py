"""Every test runs on the CPU, in full precision; compiled programs are shared through the toys of `toys.py`.

The tests compile some thousand small programs, once each: LLVM's optimisation of them would take as long as all else.
What the README's commands run in CI is optimised as usual, the auditor with its comparison of bits among it.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_default_matmul_precision", "float32")
