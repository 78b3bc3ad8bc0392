"""Products and attention of few rows, random bits and draws, on a CPU, compiled by LLVM.

A step of decoding multiplies a few rows with every weight, so its least time is that of reading the
weights.  XLA:CPU comes close to that only for a single row of float32.  These kernels read each
weight from memory once, and the bits of a row do not depend on the number of rows.  The same holds
for the keys and values of a cache.  Random bits and drawn tokens are those of JAX.  Attention,
packed matrices and experts have kernels for a GPU too (`gpu_attention.py`, `gpu_codes.py`,
`gpu_experts.py`).
"""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.kernels.available import usable
    from specjax.kernels.coding import Coding, together
    from specjax.kernels.gpu_attention import few_queries_on_gpu, takes_attention_on_gpu
    from specjax.kernels.gpu_codes import GpuCodes, few_rows_of_codes_on_gpu
    from specjax.kernels.gpu_experts import few_experts_on_gpu, takes_experts_on_gpu
    from specjax.kernels.gpu_filters import least_kept_on_gpu
    from specjax.kernels.gpu_norms import (
        MOST_NORMED_ROWS,
        parts_of_products,
        summed_norm_on_gpu,
    )
    from specjax.kernels.grouped import (
        coding_of,
        few_rounded_rows,
        few_rows_of_codes,
        takes_codes,
        takes_rounded,
    )
    from specjax.kernels.layer_calls import takes_layers, whole_layers
    from specjax.kernels.layer_forms import MATRICES, LayersForm
    from specjax.kernels.narrow import (
        few_rows,
        few_rows_of,
        most_rows,
        takes,
        takes_stacked,
        widens_columns,
    )
    from specjax.kernels.paging import (
        few_queries_of_pages,
        takes_pages,
        write_pages,
        write_slots,
        writes_pages,
        writes_slots,
    )
    from specjax.kernels.queries import MOST_TOKENS, few_queries, takes_attention
    from specjax.kernels.randomness import random_bits, takes_random_bits
    from specjax.kernels.token_draws import Draws, draws, takes_draws
    from specjax.kernels.tpu_pages import (
        few_queries_of_pages_on_tpu,
        takes_pages_on_tpu,
        write_pages_on_tpu,
        writes_pages_on_tpu,
    )

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "MATRICES",
    "MOST_NORMED_ROWS",
    "MOST_TOKENS",
    "Coding",
    "Draws",
    "GpuCodes",
    "LayersForm",
    "coding_of",
    "draws",
    "few_experts_on_gpu",
    "few_queries",
    "few_queries_of_pages",
    "few_queries_of_pages_on_tpu",
    "few_queries_on_gpu",
    "few_rounded_rows",
    "few_rows",
    "few_rows_of",
    "few_rows_of_codes",
    "few_rows_of_codes_on_gpu",
    "least_kept_on_gpu",
    "most_rows",
    "parts_of_products",
    "random_bits",
    "summed_norm_on_gpu",
    "takes",
    "takes_attention",
    "takes_attention_on_gpu",
    "takes_codes",
    "takes_draws",
    "takes_experts_on_gpu",
    "takes_layers",
    "takes_pages",
    "takes_pages_on_tpu",
    "takes_random_bits",
    "takes_rounded",
    "takes_stacked",
    "together",
    "usable",
    "whole_layers",
    "widens_columns",
    "write_pages",
    "write_pages_on_tpu",
    "write_slots",
    "writes_pages",
    "writes_pages_on_tpu",
    "writes_slots",
]
