"""What random EAGLE-3 and P-EAGLE heads draft, computed by NumPy alone from published tensors.

The target's features come from a pass without a cache, which `tests/product` compares with
transformers.
"""

from __future__ import annotations

import functools
import pathlib

import folders
import numpy as np
from eagle3_folders import LAYOUTS, PARALLEL, Head, features_of, target_model, write
from naive_eagle3 import NaiveEagle3


class Reference(NaiveEagle3):
    """What a head predicts, from its tensors and the target's features."""

    def __init__(self, head: Head, tensors: dict[str, np.ndarray], kind: str = "llama") -> None:
        def plain(name: str) -> str:
            for stem in ("midlayer.0.", "midlayer.1."):
                if name.startswith(stem):
                    return name.replace("midlayer", "layers", 1)
            return name.replace("midlayer.", "layers.0.")

        own = {plain(name): np.asarray(t, np.float64) for name, t in tensors.items()}
        of_target = target_model(kind).tensors
        table = np.float64(of_target["model.embed_tokens.weight"])
        matrix = np.float64(of_target.get("lm_head.weight", table))
        super().__init__(
            head,
            own,
            own.get("embed_tokens.weight", table),
            own.get("lm_head.weight", matrix),
            lambda tokens: features_of(kind, tokens, head.taps),
        )


@functools.cache
def reference(layout: str) -> Reference:
    head, _, midlayer, kind = LAYOUTS[layout]
    return Reference(head, head.tensors(1, midlayer), kind)


@functools.cache
def parallel(layout: str) -> tuple[pathlib.Path, Reference]:
    head, config = PARALLEL[layout]
    tensors = head.tensors(2)
    made = write(folders.ROOT / f"peagle-{layout}", config(head), tensors)
    return made, Reference(head, tensors)
