"""Proposers that cannot work are refused by name, with the cure."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from toys import TABLES as toys
from toys import TRANSFORMERS

from specjax import (
    RULES,
    Decoder,
    DraftModel,
    DraftTree,
    DynamicTree,
    EarlyExit,
    FirstOf,
    NGram,
    NoProposer,
)
from specjax.methods import DraftSource, EarlyExitSource
from specjax.proposers import Adaptive, Chain

NET = toys.model(num_layers=1)


def tree_of(**changes):
    return DynamicTree(
        DraftSource(NET, toys.VOCAB), **{"depth": 2, "width": 2, "num_nodes": 4} | changes
    )


REFUSED = {
    "a proposer as a source": (lambda: Chain(NGram(2), 3), ["source=<a NGram>", "pass a source"]),
    "no levels": (lambda: DraftTree(NET, toys.VOCAB, ()), ["branching=()", "at least 1"]),
    "a level without children": (
        lambda: DraftTree(NET, toys.VOCAB, (2, 0)),
        ["branching=(2, 0)", "at least 1"],
    ),
    "more siblings than tokens": (lambda: DraftTree(NET, 4, (5,)), ["branching=(5,)", "4 tokens"]),
    "no depth": (lambda: tree_of(depth=0), ["depth=0", "at least 1"]),
    "no width": (lambda: tree_of(width=0), ["width=0", "[1, 29]"]),
    "too wide": (lambda: tree_of(width=30), ["width=30", "[1, 29]"]),
    "more nodes than candidates": (
        lambda: tree_of(num_nodes=8),
        ["num_nodes=8", "7 candidates", "[2, 7]"],
    ),
    "the root alone": (lambda: tree_of(num_nodes=1), ["num_nodes=1", "[2, 7]"]),
    "no layer": (
        lambda: EarlyExit(TRANSFORMERS.model(), 0),
        ["exit_layer=0", "2 layers", "[1, 1]"],
    ),
    "all layers": (
        lambda: EarlyExit(TRANSFORMERS.model(), 2),
        ["exit_layer=2", "2 layers", "[1, 1]"],
    ),
    "no layers to exit from": (
        lambda: EarlyExit(object(), 1),
        ["over specjax.Transformer, and not over object"],
    ),
    "no drafts": (lambda: EarlyExit(TRANSFORMERS.model(), 1, 0), ["num_drafts=0", "at least 1"]),
    "threshold above 1": (
        lambda: DraftModel(NET, toys.VOCAB, 2, 1.5),
        ["confidence_threshold=1.5", "[0, 1]"],
    ),
    "threshold below 0": (
        lambda: EarlyExit(TRANSFORMERS.model(), 1, 2, -0.1),
        ["confidence_threshold=-0.1", "[0, 1]"],
    ),
    "threshold nan": (
        lambda: DraftModel(NET, toys.VOCAB, 2, float("nan")),
        ["confidence_threshold=nan", "[0, 1]"],
    ),
    "unequal depths": (
        lambda: FirstOf(NGram(2), DraftModel(NET, toys.VOCAB, 3)),
        ["2 deep", "3", "the same depth"],
    ),
    "a shared cache": (
        lambda: FirstOf(NGram(2), EarlyExit(TRANSFORMERS.model(), 1, 2)),
        ["Chain over EarlyExitSource drafts in the target's cache", "alone"],
    ),
    "no part of an Adaptive": (lambda: Adaptive(None, None, (1,)), ["draft [] tokens deep"]),
    "unequal parts of an Adaptive": (
        lambda: Adaptive(NGram(2), DraftModel(NET, toys.VOCAB, 3), (1, 3)),
        ["draft [2, 3] tokens deep", "the same num_drafts"],
    ),
    "a tree in an Adaptive": (
        lambda: Adaptive(NGram(2), DraftTree(NET, toys.VOCAB, (2, 1)), (1, 3)),
        ["a StaticTree drafts fixed trees", "pass chains"],
    ),
    "a shared cache in an Adaptive": (
        lambda: Adaptive(NGram(2), EarlyExit(TRANSFORMERS.model(), 1, 2), (1, 3)),
        ["drafts fixed trees or in the target's cache", "pass chains"],
    ),
    "widths without all drafts": (
        lambda: Adaptive(NGram(3), None, (1, 3)),
        ["widths=(1, 3)", "from 1 to 4"],
    ),
    "widths without none": (lambda: Adaptive(NGram(3), None, (2, 4)), ["widths=(2, 4)"]),
    "widths twice": (lambda: Adaptive(NGram(3), None, (1, 2, 2, 4)), ["ascending numbers"]),
    "a pass of no width": (
        lambda: Adaptive(NGram(3), None, (1, 3, 4), compiled=(1, 2, 4)),
        ["compiled=(1, 2, 4)", "widths=(1, 3, 4)", "from 1 to 4"],
    ),
    "no pass for all drafts": (
        lambda: Adaptive(NGram(3), None, (1, 3, 4), compiled=(1, 3)),
        ["compiled=(1, 3)", "from 1 to 4"],
    ),
    "an Adaptive without costs": (
        lambda: Adaptive(NGram(3), None, (1, 4)).bind(None, None),
        ["specjax.adaptive(...)"],
    ),
    "more nodes than tokens": (
        lambda: Decoder(toys.model(), NoProposer(num_nodes=9), RULES["match"](), (), 8),
        ["9 nodes", "capacity of 8", "propose fewer"],
    ),
    "less than no drafts": (
        lambda: toys.prefill(
            toys.decoder("none", "match"), toys.params("none"), num_drafts=np.array([1, 0, -2, 1])
        ),
        ["num_drafts=-2", "0 (plain decoding)"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    """The error names the value and the cure."""
    make, words = REFUSED[case]
    with pytest.raises(ValueError) as caught:
        make()
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


class Fixed(DynamicTree):
    """Says that its nodes are a function of the text."""

    point_mass = True


def test_siblings_as_point_masses_do_not_stand_beside_drawn_ones():
    """Such siblings have no distribution; shared noise needs none."""
    grown, drawn = (
        Fixed(DraftSource(NET, toys.VOCAB), 2, 2, 5),
        DraftModel(NET, toys.VOCAB, 2),
    )
    dec = Decoder(toys.model(), FirstOf(grown, drawn), RULES["match"](), (), toys.CAPACITY)
    arrays = toys.params("none").replace(proposer=(toys.truncated(), toys.truncated()))
    state = jax.eval_shape(functools.partial(toys.prefill, dec, arrays))
    assert jax.eval_shape(dec.step, arrays, state)[1].proposal.tokens.shape == (4, 5)
    for proposer in (FirstOf(grown, drawn), FirstOf(drawn, grown)):
        with pytest.raises(
            ValueError,
            match=r"^Fixed over DraftSource proposes siblings as point masses.*"
            r"use the rule match",
        ):
            Decoder(toys.model(), proposer, RULES["rejection"](), (), toys.CAPACITY)
    assert FirstOf(grown, NGram(2)).point_mass  # two of point masses go together
    Decoder(toys.model(), FirstOf(grown, NGram(2)), RULES["rejection"](), (), toys.CAPACITY)


@dataclasses.dataclass(frozen=True)
class Tapped(NGram):
    """A proposer that reads some layers of the target."""

    layers: tuple[int, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        self.declare(taps=self.layers)


def test_two_proposers_read_the_same_layers_or_one_reads_none():
    for one, two in (((1,), (1,)), ((), (2,)), ((2,), ()), ((), ())):
        assert FirstOf(Tapped(layers=one), Tapped(layers=two)).taps == (one or two)
    with pytest.raises(ValueError, match=r"the layers \(1,\) and \(2,\) .* the same taps"):
        FirstOf(Tapped(layers=(1,)), Tapped(layers=(2,)))


def test_the_narrowest_tree_is_one():
    assert tree_of(width=1, num_nodes=3).max_depth == 2
    assert tree_of(width=29, num_nodes=2).num_nodes == 2
    assert DraftTree(NET, 4, (4,)).num_nodes == 5  # all tokens are siblings


def test_a_dynamic_tree_in_the_cache_of_the_target_has_room_for_what_it_reads():
    """The root and four nodes of each of two levels, which are more than the proposed nodes."""
    source = EarlyExitSource(TRANSFORMERS.model(), 1)
    assert DynamicTree(source, depth=3, width=4, num_nodes=6).scratch == 9
    assert DynamicTree(source, depth=3, width=4, num_nodes=12).scratch == 12


@dataclasses.dataclass(frozen=True)
class Picky(NGram):
    """A proposer that works under some rules."""

    def check(self, rule):
        if rule.wants_logits:
            raise ValueError("Picky works with match")


@pytest.mark.parametrize("parts", [(Picky(2), None), (None, Picky(2)), (NGram(2), Picky(2))])
def test_an_adaptive_asks_its_parts_about_the_rule(parts):
    make = functools.partial(Decoder, toys.model(), Adaptive(*parts, (1, 3)))
    make(RULES["match"](), (), toys.CAPACITY)
    with pytest.raises(ValueError, match="Picky works with match"):
        make(RULES["rejection"](), (), toys.CAPACITY)
