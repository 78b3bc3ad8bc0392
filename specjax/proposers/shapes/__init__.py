"""Shapes arrange the drafts of a source: a chain, trees, choices."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.proposers.shapes.base import BlockShape, Shape
    from specjax.proposers.shapes.best_first import BestFirst
    from specjax.proposers.shapes.chain import Chain, check_num_drafts
    from specjax.proposers.shapes.choice_tree import ChoiceTree
    from specjax.proposers.shapes.choices import (
        Choices,
        best_tree,
        expected_length,
        node_acceptance,
    )
    from specjax.proposers.shapes.dynamic_tree import DynamicTree
    from specjax.proposers.shapes.static_tree import StaticTree

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "BestFirst",
    "BlockShape",
    "Chain",
    "ChoiceTree",
    "Choices",
    "DynamicTree",
    "Shape",
    "StaticTree",
    "best_tree",
    "check_num_drafts",
    "expected_length",
    "node_acceptance",
]
