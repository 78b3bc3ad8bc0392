"""Many faults in one compiled program: which of them is planted is a number, and data.

A rule may carry numbers, one per row, which the decoder traces.  Here they say which of the wrong
rules of `faults.py` decides, and which of its wrong decoders steps; the parameters of a chain say
which of its wrong chains drafts.  The wrong parts themselves are those of `faults.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import faults
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from table_sources import TableSource

from specjax import Decoder, Match, Rejection
from specjax.contract import Proposer, Rule
from specjax.proposers import Chain

RULES: tuple[type[Rejection], ...] = (
    Rejection, faults.SharedAcceptance, faults.SharedResidual, faults.ReusedNoise,
    faults.NoResidual, faults.ResidualBonus, faults.EmptyResidual, faults.BonusOnly,
    faults.FrozenAtTheRoot, faults.TopPFirst,
)  # fmt: skip
DECODERS: tuple[type[Decoder], ...] = (
    Decoder, faults.Unwarped, faults.MixedUp, faults.EndsWithBlocks, faults.CountsPastTheEnd,
    faults.CountsPadding, faults.PaddingTemperature, faults.HalvedKey, faults.KeyOfTheRow,
    faults.FirstRowDecides, faults.PenaltiesAtTheRoot, faults.CorruptsSomeTexts,
    faults.KeepsTheBlock,
)  # fmt: skip
CHAINS: tuple[type[Chain], ...] = (
    Chain, faults.ArgmaxDraft, faults.RepeatedNoise, faults.DropsUnlikely, faults.RawQ,
    faults.OtherRowsAboveTwo,
)  # fmt: skip
"""The right part first, and wrong ones that leave every array its shape."""


def pick(made: Any, wanted: Any, instead: Any) -> Any:
    """`instead` where `wanted`, and else `made`: two trees of equal shapes."""
    return jax.tree.map(lambda x, y: y if x is y else jnp.where(wanted, y, x), made, instead)


@struct.dataclass
class AnyRejection(Rejection):
    """The rule `RULES[rule]`, in a decoder of the kind `OfRules.KINDS[decoder]`."""

    rule: Any = 0.0
    decoder: Any = 0.0

    def __call__(self, draw, proposal, tree, logits):
        verdicts = [kind()(draw, proposal, tree, logits) for kind in RULES]
        return jax.tree.map(
            lambda *each: jnp.stack(each)[jnp.asarray(self.rule, jnp.int32)], *verdicts
        )


@struct.dataclass
class InAny(Rejection):
    """`Rejection` in a decoder of the kind `DECODERS[decoder]`."""

    decoder: Any = 0.0


@struct.dataclass
class MatchInAny(Match):
    """`Match` in a decoder of the kind `DECODERS[decoder]`."""

    decoder: Any = 0.0


class AnyDecoder(faults.Faulty):
    """The decoder that its rule names."""

    KINDS = DECODERS

    def _each(self, hook, state, made, *given):
        """What the hook of the named decoder makes of the last of its arguments."""
        named = state.rule.decoder[0]
        for number, kind in enumerate(self.KINDS[1:], 1):
            own = getattr(kind, hook)(self, *given)
            made = pick(made, named == number, own)
        return made

    def before(self, state):
        return self._each("before", state, state, state)

    def after(self, state, after, info):
        return self._each("after", state, after, state, after, info)

    def before_draw(self, state):
        return self._each("before_draw", state, state, state)

    def after_draw(self, state, draw):
        return self._each("after_draw", state, draw, state, draw)

    def path(self, state, path):
        return self._each("path", state, path, state, path)


class OfRules(AnyDecoder):
    """One of those that wrong rules are planted with, which compiles in half the time."""

    KINDS = DECODERS[:2]


@dataclasses.dataclass(frozen=True)
class AnyChain(Chain):
    """The chain `CHAINS[number]` over a table; the parameters are the table and the number."""

    def init(self, params, prompt, capacity):
        return super().init(params[0], prompt, capacity)

    def observe(self, params, state, block):
        return super().observe(params[0], state, block)

    def propose(self, params, state, context):
        table, number = params
        made, state = super().propose(table, state, context)
        for other, kind in enumerate(CHAINS[1:], 1):
            chain = kind(self.source, self.num_drafts)
            own, _ = chain.propose(table, state, context)
            made = pick(made, number == other, own)
        return made, state


def together(
    rule: Rule, proposer: Proposer, decoder: type[Decoder], table: Any, num_drafts: int
) -> tuple[type[Decoder], Proposer, Rule, Any] | None:
    """The decoder, proposer, rule and parameters of the proposer that stand for these parts over a
    table [V, V]; None if there are none."""
    kind, source = type(proposer), TableSource(len(table))
    if decoder not in DECODERS or kind not in CHAINS:
        return None
    if kind is not Chain:
        wrong = AnyChain(source, num_drafts), rule, (table, np.int32(CHAINS.index(kind)))
        return (Decoder, *wrong) if decoder is Decoder and type(rule) is Rejection else None
    number, chain = float(DECODERS.index(decoder)), Chain(source, num_drafts)
    if type(rule) is Match:
        return AnyDecoder, chain, MatchInAny(number), table
    if type(rule) is Rejection:
        return AnyDecoder, chain, InAny(number), table
    if type(rule) not in RULES or decoder not in OfRules.KINDS:
        return None
    return OfRules, chain, AnyRejection(float(RULES.index(type(rule))), number), table
