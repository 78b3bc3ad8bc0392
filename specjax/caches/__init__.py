"""Caches of the committed tokens of each row, and the reading of prompts in chunks."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.caches.branches import BranchCache, Memory
    from specjax.caches.choosing import ChoosingCache, chunks_of_turn, summarised
    from specjax.caches.going_back import kept, restored
    from specjax.caches.hybrid import Both, HybridCache, Written
    from specjax.caches.kv import SPARE_SLOTS, KVCache, stage, visible_slots
    from specjax.caches.layer_state import (
        LayerState,
        Staged,
        advanced,
        decayed,
        replayed,
        with_node,
    )
    from specjax.caches.pages import (
        Joint,
        Paged,
        PagedCache,
        Pages,
        Pool,
        can_have_pages,
        cleared,
        copied_page,
        in_pages,
        is_paged,
        pools_of,
        slots_of,
        with_pages,
        with_table,
        without_pages,
    )
    from specjax.caches.prefill import (
        CHUNK,
        empty_cache,
        in_chunks,
        places,
        positions_of,
        read_prompt,
    )
    from specjax.caches.recurrent import RecurrentCache
    from specjax.caches.rounded import (
        CACHE_DTYPES,
        as_read,
        is_rounded,
        read_size,
        stored,
        stored_size,
    )
    from specjax.caches.sliding_window import WindowedCache

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "CACHE_DTYPES",
    "CHUNK",
    "SPARE_SLOTS",
    "Both",
    "BranchCache",
    "ChoosingCache",
    "HybridCache",
    "Joint",
    "KVCache",
    "LayerState",
    "Memory",
    "Paged",
    "PagedCache",
    "Pages",
    "Pool",
    "RecurrentCache",
    "Staged",
    "WindowedCache",
    "Written",
    "advanced",
    "as_read",
    "can_have_pages",
    "chunks_of_turn",
    "cleared",
    "copied_page",
    "decayed",
    "empty_cache",
    "in_chunks",
    "in_pages",
    "is_paged",
    "is_rounded",
    "kept",
    "places",
    "pools_of",
    "positions_of",
    "read_prompt",
    "read_size",
    "replayed",
    "restored",
    "slots_of",
    "stage",
    "stored",
    "stored_size",
    "summarised",
    "visible_slots",
    "with_node",
    "with_pages",
    "with_table",
    "without_pages",
]
