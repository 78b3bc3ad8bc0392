"""The common functions of published formats: tables, layers, sizes, reading and placing."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.methods.published.drafter import (
        PublishedDrafter,
        Sizes,
        is_over,
        own_shardings,
        sizes_of,
    )
    from specjax.methods.published.format import (
        Description,
        Export,
        Format,
        Layout,
        Tensors,
        folder_of,
    )
    from specjax.methods.published.layers import (
        dense_rows,
        layer_prefixes,
        layer_rows,
        read_layers,
        reads_pairs,
        unwritable,
        window_lines,
        write_layers,
    )
    from specjax.methods.published.placing import Table, read_drafter
    from specjax.methods.published.shared import (
        EMBEDDING,
        HEAD,
        TABLES,
        is_reduced,
        num_units,
        own_faults,
        repeats,
        table_faults,
        with_tables,
    )
    from specjax.methods.published.source import PublishedSource
    from specjax.methods.published.speculators import on_hub, speculators_config
    from specjax.methods.published.tables import SharedParams, by_row, embedding_of, head_of
    from specjax.methods.published.target_sizes import (
        check_features,
        check_taps,
        check_target,
        check_width,
        counted_taps,
    )
    from specjax.methods.published.vocabulary import (
        check_rows,
        read_vocabulary,
        read_whole,
        without_weights,
    )

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "EMBEDDING",
    "HEAD",
    "TABLES",
    "Description",
    "Export",
    "Format",
    "Layout",
    "PublishedDrafter",
    "PublishedSource",
    "SharedParams",
    "Sizes",
    "Table",
    "Tensors",
    "by_row",
    "check_features",
    "check_rows",
    "check_taps",
    "check_target",
    "check_width",
    "counted_taps",
    "dense_rows",
    "embedding_of",
    "folder_of",
    "head_of",
    "is_over",
    "is_reduced",
    "layer_prefixes",
    "layer_rows",
    "num_units",
    "on_hub",
    "own_faults",
    "own_shardings",
    "read_drafter",
    "read_layers",
    "read_vocabulary",
    "read_whole",
    "reads_pairs",
    "repeats",
    "sizes_of",
    "speculators_config",
    "table_faults",
    "unwritable",
    "window_lines",
    "with_tables",
    "without_weights",
    "write_layers",
]
