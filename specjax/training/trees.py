"""The types of the arrays of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from jax import Array

from specjax.types import ArrayTree

Tree: TypeAlias = dict[str, ArrayTree]
"""Parameters, or a state, by name."""

Batch: TypeAlias = Mapping[str, Array]
"""A batch as a traced loss sees it.  Axis 0 of each array is the row."""

Row: TypeAlias = dict[str, np.ndarray]
"""The arrays of a row, or of the rows of a batch, on the host."""
