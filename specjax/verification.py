"""`Verification`: the result of `Decoder.verify`, which `Decoder.commit` takes."""

from __future__ import annotations

from flax import struct
from jax import Array

from specjax.tree import Tree
from specjax.types import ModelOutput, Verdict


@struct.dataclass
class Verification:
    """The target's pass over a proposal, and the rule's verdict on it."""

    verdict: Verdict  # of each row
    tree: Tree  # of each row, without drafts that are deeper than the row's `num_drafts`
    output: ModelOutput  # of the target's pass; the proposal is staged in its cache
    logits: Array  # [B, N, V] float32; the target's warped logits after each node
