"""Arranges the drafts of trained drafters as chains and trees, by a few numbers."""

from __future__ import annotations

from specjax._internal.checks import within
from specjax.contract import BlockSource, Proposer, Source
from specjax.methods import Drafter
from specjax.proposers import BestFirst, Chain, ChoiceTree, DynamicTree

CHAIN = 8
"""The greatest depth, in drafts, of the drafts of `auto` by default."""

_DEPTH, _WIDTH = 8, 10
"""EAGLE-3's trees: their depth, in drafts, and the most children of a node."""


def arrange(
    drafter: Drafter,
    num_drafts: int | None = None,
    num_nodes: int | None = None,
    width: int | None = None,
) -> Drafter:
    """Returns a drafter with its drafts in another chain or tree.

    Args:
      drafter: a result of `load_drafter`.
      num_drafts: the length of a chain, or with `num_nodes` the depth of a tree whose drafter
        predicts one token after another.
      num_nodes: the nodes of a tree that is chosen anew in every step, the root included; None: a
        chain.  With neither number the drafts stay as they are.
      width: the most children of a node of a tree.

    Raises:
      ValueError: numbers that the drafter does not allow, or a drafter without a source.

    Example:
      >>> tree = arrange(specjax.load_drafter("org/head", target), num_nodes=32)
    """
    if num_drafts is None and num_nodes is None:
        return drafter

    def shape(source: Source | BlockSource) -> Proposer:
        many = {} if width is None else {"width": width}
        if isinstance(source, BlockSource):
            if num_nodes is not None:
                return BestFirst(source, num_nodes, **many)
            assert num_drafts is not None
            within("num_drafts", num_drafts, 1, source.depth, f", the drafts of {drafter.name}")
            return ChoiceTree(source, tuple((0,) * n for n in range(1, num_drafts + 1)))
        if num_nodes is None:
            assert num_drafts is not None
            return Chain(source, num_drafts)
        most = min(_WIDTH if width is None else width, source.vocab_size)
        depth = _DEPTH if num_drafts is None else num_drafts
        return DynamicTree(source, depth, most, num_nodes)

    return drafter.shaped(shape)


def as_chain(drafter: Drafter, num_drafts: int | None = None) -> Drafter:
    """Returns a drafter of chains unchanged, or one of trees as chains of at most `CHAIN` drafts.

    Raises:
      ValueError: a length that the drafter does not allow, or a drafter without a source.
    """
    proposer = drafter.proposer
    if num_drafts is None and proposer.is_chain:
        return drafter
    most = min(proposer.max_depth, CHAIN)
    return arrange(drafter, most if num_drafts is None else num_drafts)
