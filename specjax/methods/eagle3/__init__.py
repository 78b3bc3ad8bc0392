"""EAGLE-3: its network, source, published folders and learner."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.methods.eagle3.network import (
        Eagle3,
        Eagle3Config,
        draft_logits,
        eagle3_axes,
        eagle3_shapes,
    )
    from specjax.methods.eagle3.reader import (
        EAGLE3,
        Parts,
        details_of,
        is_parallel,
        own_table,
        packaging_of,
        proposal_depth,
        read_parts,
        without_copies,
    )
    from specjax.methods.eagle3.rounded import drafter_in_int8
    from specjax.methods.eagle3.rows import mask_row
    from specjax.methods.eagle3.source import (
        Eagle3Source,
        Eagle3State,
        EagleOwn,
        EagleParams,
        EagleSource,
        PairNetwork,
        PairReading,
        PairSource,
        at_index,
        fuse,
        logits_of,
        paired,
        parents_of,
        read_block,
        read_pairs,
    )
    from specjax.methods.eagle3.writer import (
        faults,
        flat_config,
        flat_faults,
        source_of,
        speculators_faults,
        speculators_fields,
        stacked,
    )

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "EAGLE3",
    "Eagle3",
    "Eagle3Config",
    "Eagle3Source",
    "Eagle3State",
    "EagleOwn",
    "EagleParams",
    "EagleSource",
    "PairNetwork",
    "PairReading",
    "PairSource",
    "Parts",
    "at_index",
    "details_of",
    "draft_logits",
    "drafter_in_int8",
    "eagle3_axes",
    "eagle3_shapes",
    "faults",
    "flat_config",
    "flat_faults",
    "fuse",
    "is_parallel",
    "logits_of",
    "mask_row",
    "own_table",
    "packaging_of",
    "paired",
    "parents_of",
    "proposal_depth",
    "read_block",
    "read_pairs",
    "read_parts",
    "source_of",
    "speculators_faults",
    "speculators_fields",
    "stacked",
    "without_copies",
]
