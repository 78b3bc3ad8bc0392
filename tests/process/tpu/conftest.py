"""libtpu describes chips that are not there; it must be told before JAX starts.

The suite does not collect this folder, since its tests need libtpu, and a JAX without the flags of
`tests/conftest.py`.  `.ci/run` runs it in an environment of its own.
"""

import pathlib
import sys

from bench.tpu.slices import prepare_environment

prepare_environment()
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
