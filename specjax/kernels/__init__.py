"""Products of few activations with a matrix on a CPU, compiled by LLVM.

A step of decoding multiplies a few rows with every weight, so its time is that of reading
the weights.  XLA:CPU does so for a single row of float32 alone.  More rows, bfloat16 and int8 take
it 1.2 to 3 times as long, because it packs the weights anew in every product.  These kernels read
each weight once, and the bits of a row do not depend on how many rows there are.
"""

from specjax.kernels.narrow import MOST_ROWS, few_rows, takes, usable

__all__ = ["MOST_ROWS", "few_rows", "takes", "usable"]
