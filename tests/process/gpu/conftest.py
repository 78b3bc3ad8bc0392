"""JAX's plugin for CUDA describes GPUs that are not there; JAX must be kept from looking for one.

The suite does not collect this folder, since its tests need the plugin, and a JAX without the flags
of `tests/conftest.py`.  `.ci/run` runs it in an environment of its own.
"""

import pathlib
import sys

from bench.gpu.described import prepare_environment

prepare_environment()
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
