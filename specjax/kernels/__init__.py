"""Products of few activations with a matrix on a CPU, compiled by LLVM.

A step of decoding multiplies a few rows with every weight, so its least time is that of reading
the weights.  XLA:CPU comes close to that for a single row of float32 alone.  These kernels read
each weight from memory once, and the bits of a row do not depend on how many rows there are.
"""

from specjax.kernels.narrow import MOST_ROWS, few_rows, takes, usable

__all__ = ["MOST_ROWS", "few_rows", "takes", "usable"]
