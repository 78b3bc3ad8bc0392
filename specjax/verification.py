"""`Verification`: what a target's pass over a proposal says, between verify and commit."""

from __future__ import annotations

from flax import struct
from jax import Array

from specjax.tree import Tree
from specjax.types import ModelOutput, Verdict


@struct.dataclass
class Verification:
    """What `Decoder.verify` found out about a proposal, and `Decoder.commit` goes by."""

    verdict: Verdict  # of each row
    tree: Tree  # of each row, without the drafts that are deeper than the row's `num_drafts`
    output: ModelOutput  # of the target's pass, its cache with the proposal staged
    logits: Array  # [B, N, V] float32; the target's after each node, warped
