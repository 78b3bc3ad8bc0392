"""Every test runs on the CPU, in full precision; compiled programs are shared through the toys of `toys.py`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_default_matmul_precision", "float32")
