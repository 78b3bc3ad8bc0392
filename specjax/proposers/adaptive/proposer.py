"""`Adaptive`: chooses the number of drafts by recent acceptance and the cost of a step."""

from __future__ import annotations

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array

from specjax import tree
from specjax._internal.checks import settle
from specjax._internal.control_flow import apply_if
from specjax.contract import ArrayTree, Context, Loaded, Proposer, Rule
from specjax.proposers.adaptive.choosing import Part, choose
from specjax.proposers.adaptive.policy import POLICY, Policy
from specjax.proposers.adaptive.rates import Rates
from specjax.proposers.adaptive.rest import LONGEST, Rest
from specjax.proposers.adaptive.settling import Settling
from specjax.proposers.adaptive.state import (
    MEASURED,
    RESTS,
    AdaptiveParams,
    AdaptiveState,
    PartState,
    gains_of_parts,
    rates_after,
)
from specjax.proposers.adaptive.tree_gains import ChainGains, LastTree, TreeGains
from specjax.proposers.adaptive.trials import Trials
from specjax.proposers.catch_up import AT_ONCE
from specjax.proposers.combine import Calibrated, best_nodes, ranked, with_logits
from specjax.proposers.own_text import OwnText
from specjax.proposers.waiting import Waiting
from specjax.types import ABSENT, Block, Proposal

PAUSE = POLICY.pause
"""Steps before the first trial of a proposer without an acceptance rate from earlier texts."""


@dataclasses.dataclass(frozen=True)
class Adaptive(Proposer[AdaptiveParams, AdaptiveState]):
    """Chooses plain decoding, prompt lookup or a drafter, and a depth, for the most tokens/s.

    In every step the expected number of new tokens of each option, by the recent acceptance of each
    row, is divided by the seconds of a step with that option; the greatest quotient wins.  A
    proposer that did not pay is left out, a draft model with all of its passes.  It is tried again
    after a pause, and only if the cost of all trials stays a small share of the time (`Trials`).
    The target reads as many tokens as the option has.

    Under an exact rule that shares its noise with the proposer (`match`), the text does not depend
    on these choices, and all rows of a batch take the option that is best for their sum.  Under
    another rule each row takes its own best option, so that its text does not depend on the other
    rows.

    Attributes:
      lookup: a chain that needs no model, such as `NGram`, or None.
      drafter: a chain over a source, such as a draft model, or a tree that is chosen anew in every
        step, or None.  A row for which the lookup promises as much takes the drafts of the lookup.
        Of a tree the target reads the best nodes, and it is drafted no deeper than it has nodes.
      widths: ascending numbers of tokens that the target may read of a row; from 1 to the greatest
        depth + 1, or to the nodes of a tree.
      policy: the numbers of the choice.
      brief: compile sooner, for steps that may take longer (`Proposer.brief`).
      compiled: those of `widths` that have a pass of the target of their own, the last one among
        them; drafts of another width are read in the next wider pass.  None: all of them.
    """

    lookup: Proposer | None
    drafter: Proposer | None
    widths: tuple[int, ...]
    policy: Policy = POLICY
    brief: bool = False
    compiled: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        parts = [part for part in (self.lookup, self.drafter) if part is not None]
        depths = sorted({part.max_depth for part in parts})
        if len(depths) != 1:
            raise ValueError(
                f"the parts draft {depths} tokens deep; pass a lookup, a drafter, or both with the "
                "same num_drafts"
            )
        most = max(part.num_nodes for part in parts)
        settle(
            *(
                (
                    part.shares_cache or not (part.is_chain or self._is_tree),
                    f"a {type(part).__name__} drafts fixed trees or in the target's cache: pass "
                    "chains, a DynamicTree or a BestFirst",
                )
                for part in parts
            ),
            (
                self.lookup is not None and not self.lookup.is_chain,
                f"lookup is a {type(self.lookup).__name__}; pass one of chains",
            ),
            (
                list(self.widths) != sorted({1, *self.widths, most}),
                f"widths={self.widths}; pass ascending numbers of tokens from 1 to "
                f"{most}, the depth of the drafts and one, or the nodes of a tree",
            ),
            (
                list(self.passes) != sorted({1, *self.passes, most} & {*self.widths}),
                f"compiled={self.compiled}; pass those of widths={self.widths} with a pass of "
                f"their own, from 1 to {most}",
            ),
        )
        self.declare(
            num_nodes=most,
            max_depth=depths[0],
            is_chain=not self._is_tree,
            narrower=self.passes[:-1],
            taps=() if self.drafter is None else self.drafter.taps,
            point_mass=all(part.point_mass for part in parts),
            reads_documents=any(part.reads_documents for part in parts),
            rests=not self.brief and self._can_be_left_out,
            settles=not self.brief and self.drafter is not None and self.drafter.is_chain,
        )

    @property
    def _is_tree(self) -> bool:
        """Whether the drafter makes trees of which the best nodes can be kept."""
        return self.drafter is not None and not self.drafter.is_chain and self.drafter.estimates

    @property
    def options(self) -> tuple[tuple[str, int], ...]:
        """The options of a step: plain decoding, and each proposer with each number of drafts.

        A drafter of trees also has chains, of the first child of each node, which are read in the
        passes of trees.
        Over a tree of more nodes than the lookup has, the lookup has fewer options.
        """
        last = 0 if self.drafter is None else len(self.widths)
        return (
            ("plain", 0),
            *(("lookup", width - 1) for width in self.widths[1 : 1 + self._lookups]),
            *(("drafter", width - 1) for width in self.widths[1:last]),
            *(("chain", width - 1) for width in self.chain_widths[1:]),
        )

    @property
    def passes(self) -> tuple[int, ...]:
        """The numbers of tokens of a row for which there is a pass of the target, from 1."""
        return self.widths if self.compiled is None else self.compiled

    @property
    def chain_widths(self) -> tuple[int, ...]:
        """The widths of the chains that are options beside trees, from 1."""
        if not self._is_tree or not isinstance(self.drafter, Calibrated):
            return (1,)
        return tuple(width for width in self.widths if width <= self.max_depth + 1)

    def check(self, rule: Rule) -> None:
        for part in (self.lookup, self.drafter):
            if part is not None:
                part.check(rule)

    def bind(self, target: Loaded, draft: Loaded | None) -> AdaptiveParams:
        raise ValueError("an Adaptive has costs of its own: pass specjax.adaptive(...) as drafter=")

    def init(self, params: AdaptiveParams, prompt: Block, capacity: int) -> AdaptiveState:
        rows = len(prompt.count)
        zero = jnp.zeros(rows, jnp.int32)
        rates: list[Rates] = []
        policy, seconds = self.policy, params.seconds_at(None)

        def start(index: int, part: Proposer | None, own: ArrayTree) -> PartState | None:
            if part is None:
                return None
            rates.append(Rates.start(rows, self.max_depth, params.prior[index], policy))
            pause = self._first_pause(params, rates[-1], index)
            first = seconds[1 + index * self._lookups] / seconds[0] - 1
            late = self._late(seconds, pause) if index else 0.0
            budget = jnp.where(
                params.pause[index] <= policy.pause, policy.first_budget, first + late
            )
            trials = Trials.start(pause, jnp.broadcast_to(budget, pause.shape), policy)
            # A pass over tokens that waited writes as many slots as could have waited.
            more = Waiting.width(self._of_step) if index and self._waits else 0
            return PartState(part.init(own, prompt, capacity + more), trials)

        text = waiting = None
        if self.drafter is not None and self.drafter.resumes:
            own = dataclasses.replace(prompt, documents=None)
            text = OwnText.empty(own, capacity, self.num_nodes)
        elif self._waits:
            waiting = Waiting.empty(prompt, self._of_step)
        return AdaptiveState(
            lookup=start(0, self.lookup, params.lookup),
            drafter=start(1, self.drafter, params.drafter),
            rates=jax.tree.map(lambda *parts: jnp.stack(parts, axis=1), *rates),
            text=text,
            waiting=waiting,
            offered=zero,
            drafted=jnp.zeros(rows, bool),
            missed=zero,
            worth=jnp.ones(rows, jnp.float32),
            tried=jnp.zeros(rows, bool),
            needed=jnp.ones(rows, jnp.float32),
            weight=jnp.zeros(rows, jnp.float32),
            together=jnp.zeros(rows, bool),
            rest=Rest.start(rows, params.saved, params.awake)
            if params.saved is not None and params.awake is not None and self._can_be_left_out
            else None,
            settling=Settling.start(rows) if self.settles else None,
            trees=TreeGains.start(rows, self.widths, params.trees) if self._is_tree else None,
            chains=ChainGains.start(rows, self.chain_widths, params.chains)
            if self._is_tree
            else None,
            last=LastTree.none(rows, self.num_nodes, self.max_depth) if self._is_tree else None,
        )

    def read(self, params: AdaptiveParams, state: AdaptiveState, block: Block) -> AdaptiveState:
        def after(
            part: Proposer | None, own: ArrayTree, known: PartState | None
        ) -> PartState | None:
            if part is None or known is None:
                return None
            return dataclasses.replace(known, own=part.read(own, known.own, block))

        return dataclasses.replace(
            state,
            lookup=after(self.lookup, params.lookup, state.lookup),
            drafter=after(self.drafter, params.drafter, state.drafter),
            text=None if state.text is None else state.text.append(block),
        )

    def catch_up(self, params: AdaptiveParams, state: AdaptiveState) -> AdaptiveState | None:
        def caught(
            part: Proposer | None, own: ArrayTree, known: PartState | None
        ) -> PartState | None:
            if part is None or known is None:
                return None
            made, text = known.own, state.text
            if part.resumes and text is not None:  # it was left out of steps
                every = jnp.ones(text.length.shape, bool)
                made = part.resume(own, part.rest(made), text.tokens, text.length, every)
            made = part.catch_up(own, made)
            if part is self.drafter and made is not None and state.waiting is not None:
                made = part.read(own, made, state.waiting.block)
            return dataclasses.replace(known, own=made)

        lookup = caught(self.lookup, params.lookup, state.lookup)
        drafter = caught(self.drafter, params.drafter, state.drafter)
        if any(part is not None and part.own is None for part in (lookup, drafter)):
            return None
        missed = jnp.zeros_like(state.missed)
        # No verification follows the last tree, so nothing is learned from it.
        last = None if state.last is None else state.last.forgotten()
        waiting = state.waiting
        if waiting is not None:
            waiting = waiting.emptied(jnp.bool_(True))
        return dataclasses.replace(
            state, lookup=lookup, drafter=drafter, missed=missed, last=last, waiting=waiting
        )

    @property
    def _waits(self) -> bool:
        """Whether committed tokens wait for the drafter in steps without its drafts."""
        drafter = self.drafter
        return drafter is not None and not drafter.resumes and drafter.waits

    @property
    def _can_be_left_out(self) -> bool:
        """Whether a step may commit tokens without `propose` of the drafter.

        Another drafter keeps those of one step alone, and would lose the tokens before them.
        """
        return self.drafter is None or self.drafter.resumes or self._waits

    @property
    def _of_step(self) -> int:
        """The most tokens that a step commits."""
        return self.max_depth + 1

    @property
    def _lookups(self) -> int:
        """The number of options of the lookup."""
        if self.lookup is None:
            return 0
        # The last of them holds all of its drafts.
        return sum(width < self.lookup.num_nodes for width in self.widths)

    def _of_parts(self, lookup: Array, drafter: Array) -> Array:
        """Returns [..., P] numbers of the lookup and of the drafter, of those that exist."""
        numbers = (self.lookup, lookup), (self.drafter, drafter)
        return jnp.stack([number for part, number in numbers if part is not None], axis=-1)

    def _late(self, seconds: Array, missed: Array) -> Array:
        """[B] the time in which the drafter reads `missed` tokens, in steps without drafts."""
        if self.drafter is None or not self._can_be_left_out:
            return jnp.zeros(missed.shape, jnp.float32)
        begin = 1 + self._lookups
        seconds = seconds[..., begin : begin + len(self.widths) - 1] / seconds[..., :1]
        # A draft costs no more than this: the target also reads the drafts of a step.
        passes = jnp.minimum(jnp.array(self.widths[1:]) - 1, self.max_depth)
        draft = jnp.min((seconds - 1) / passes, axis=-1)
        at_once = AT_ONCE * self.num_nodes
        if self._waits:
            missed, at_once = jnp.minimum(missed, 1), 1
        passes = jnp.ceil(missed.astype(jnp.float32) / at_once)
        return jnp.where(missed > 0, jnp.maximum(draft, 0.0) * passes, 0.0)

    def _first_pause(self, params: AdaptiveParams, rates: Rates, part: int) -> Array:
        """[B] steps before the first trial of a proposer; few if it nearly pays by the prior."""
        depths = jnp.minimum(jnp.array(self.widths[1:]) - 1, self.max_depth)
        limit = jnp.full(len(rates.slow), self.max_depth)
        gains = rates.gains(limit)
        first, seconds = 1 + part * self._lookups, params.seconds_at(None)
        depths = depths if part else depths[: self._lookups]
        quotients = gains[:, depths] / seconds[first : first + len(depths)]
        nearly = quotients.max(1) * seconds[0] > self.policy.nearly
        return jnp.where(nearly, self.policy.pause, params.pause[part]).astype(jnp.int32)

    def propose(
        self, params: AdaptiveParams, state: AdaptiveState, context: Context
    ) -> tuple[Proposal, AdaptiveState]:
        rows, drafts = len(context.pending), jnp.array(self.widths, jnp.int32) - 1
        levels = jnp.minimum(drafts, self.max_depth)
        limit = jnp.full(rows, self.max_depth, jnp.int32)
        if context.num_drafts is not None:
            limit = jnp.minimum(limit, context.num_drafts)
        found, state = self._look_up(params, state, context)
        present = jnp.minimum(_count(found), limit)
        gains = gains_of_parts(state.rates, self._of_parts(present, limit))[..., levels]
        alone = jnp.ones((rows, len(drafts)), jnp.float32)
        looked = alone if self.lookup is None else gains[:, 0]
        drafted = alone if self.drafter is None else gains[:, -1]
        straight = None
        if state.trees is not None and state.last is not None:
            last, right = state.last, state.last.right(context.pending)
            trees, chains, other = state.trees, state.chains, None
            rate, shown, beside = params.prior[1], None, None
            accepted, known = last.outcome(self.widths, *right)
            if chains is not None and len(self.chain_widths) > 1:
                sizes = self.chain_widths
                segments, *judged = last.chain_outcome(sizes, *right)
                chains = chains.learned(segments, *judged)
                straight = chains.tokens(sizes, params.prior[1])
                straight = jnp.where(limit[:, None] > 0, straight, alone[:, : len(sizes)])
                rate, shown, drafts_of_chains = chains.rate(sizes, params.prior[1])
                other = last.chain & last.teaches
                # Under other rules the text depends on what was drafted, so it does not tell
                # whether a draft that the target did not read would have been accepted.
                if context.text_is_fixed:
                    accepted -= jnp.minimum(segments.sum(1, keepdims=True), levels)
                    beside = drafts_of_chains
            trees = trees.after(accepted, known, other)
            drafted = trees.tokens(self.widths, self.max_depth, rate, shown, beside)
            drafted = jnp.where(limit[:, None] > 0, drafted, alone)
            state = dataclasses.replace(state, trees=trees, chains=chains)
        alive = jnp.ones(rows, bool) if context.num_drafts is None else context.num_drafts > 0
        length = context.length
        if length is not None and context.text_is_fixed:  # one option for all: the longest text's
            length = jnp.max(jnp.where(alive, length, 0))
        seconds = params.seconds_at(length)
        late = self._late(seconds, state.missed)
        looks = looked[:, : 1 + self._lookups]
        parts = [
            Part(name, gains, able, wait, known.trials, chains)
            for name, gains, able, wait, known, chains in (
                ("lookup", looks, present > 0, jnp.zeros_like(late), state.lookup, None),
                ("drafter", drafted, alive, late, state.drafter, straight),
            )
            if known is not None
        ]
        choice = choose(
            self.widths, seconds, parts, alive, context.remaining, context.text_is_fixed,
            self.policy, None if params.contexts is None else levels,
        )  # fmt: skip
        forced = params.forced != MEASURED
        option = jnp.where(forced, jnp.maximum(params.forced, 0), choice.option)
        depth = jnp.array([depth for _, depth in self.options], jnp.int32)[option]
        uses = jnp.array([name in ("drafter", "chain") for name, _ in self.options])[option]
        chained = jnp.array([name == "chain" for name, _ in self.options])[option]
        column = jnp.searchsorted(drafts, depth)[:, None]
        gained = jnp.take_along_axis(drafted, column, axis=1)[:, 0]
        if straight is not None:
            column = jnp.minimum(column, straight.shape[1] - 1)
            of_chain = jnp.take_along_axis(straight, column, axis=1)[:, 0]
            gained = jnp.where(chained, of_chain, gained)
        worse = jnp.take_along_axis(looked, jnp.searchsorted(drafts, depth)[:, None], axis=1)[:, 0]
        worse = worse < gained
        # In a trial it drafts even where the lookup promises more, or nothing would be learned.
        worse |= (present == 0) | choice.tried | forced
        uses_drafter = uses & (limit > 0) & worse
        proposal = found
        if self.drafter is not None:
            deepest = jnp.max(jnp.where(uses_drafter, jnp.minimum(depth, limit), jnp.int32(0)))
            own = jnp.where(uses_drafter, jnp.minimum(depth, limit), 0)
            if self._is_tree:
                # A row's tree must not depend on the depth of other rows' trees.
                chains = None if straight is None else chained
                context = dataclasses.replace(context, num_drafts=own, chains=chains)
            # Its pass reads every row, so all of them read what they missed.
            made, state = self._draft(params, state, context, deepest, limit > 0)
            if state.last is not None:
                made, state = self._best(made, state, depth, own, chained)
            proposal = made if found is None else _either(uses_drafter, made, found)
        assert proposal is not None
        offered = jnp.minimum(jnp.minimum(_count(proposal), depth), limit)
        parent = jnp.where(
            jnp.arange(self.num_nodes) <= offered[:, None], tree.chain(self.num_nodes), ABSENT
        )
        if self._is_tree:
            parent = jnp.where(uses_drafter[:, None], proposal.parent, parent)
            nodes = jnp.where(limit < self.max_depth, jnp.minimum(depth, limit), depth)
            offered = jnp.where(uses_drafter, nodes, offered)
        settling = state.settling
        if settling is not None:
            settling = settling.chosen(uses_drafter & (offered == limit) & ~choice.tried)
        state = dataclasses.replace(
            state,
            settling=settling,
            offered=offered,
            drafted=uses_drafter,
            needed=choice.time,
            weight=choice.weight,
            worth=choice.worth,
            tried=choice.tried,
            together=jnp.full(rows, context.text_is_fixed),
            lookup=_waited(state.lookup, present > 0, (offered > 0) & ~uses_drafter),
            drafter=_waited(state.drafter, limit > 0, (offered > 0) & uses_drafter),
        )
        return dataclasses.replace(proposal, parent=parent), state

    def _best(
        self, made: Proposal, state: AdaptiveState, drafts: Array, levels: Array, chain: Array
    ) -> tuple[Proposal, AdaptiveState]:
        """Keeps the best `drafts` [B] of trees of so many levels [B], and remembers all of them."""
        assert state.last is not None
        _, place = ranked(made)
        last = LastTree.of(made, place, levels, chain, state.last)
        return best_nodes(made, place, drafts + 1), dataclasses.replace(state, last=last)

    def settled(self, params: AdaptiveParams, state: AdaptiveState, alive: Array) -> Array:
        assert state.settling is not None
        keeps = ((state.settling.steps > 0) | ~alive).all()
        # A forced option is timed in steps without a choice, as most of its steps will be.
        deepest = (params.forced == len(self.options) - 1) & state.drafted.any()
        return jnp.where(params.forced == MEASURED, keeps, deepest)

    def draft(
        self, params: AdaptiveParams, state: AdaptiveState, context: Context
    ) -> tuple[Proposal, AdaptiveState]:
        drafter, known = self.drafter, state.drafter
        assert drafter is not None and known is not None
        made, own = drafter.propose(params.drafter, known.own, context)
        offered = _count(made)
        if context.num_drafts is not None:
            offered = jnp.minimum(offered, context.num_drafts)
        known = dataclasses.replace(known, own=own)
        return made, dataclasses.replace(state, drafter=known, offered=offered)

    def observe(self, params: AdaptiveParams, state: AdaptiveState, block: Block) -> AdaptiveState:
        live, tokens = block.count > 0, block.count.astype(jnp.float32)
        needed = state.needed * live

        def shared(x: Array) -> Array:
            """Returns the weighted mean over all rows, where they choose together."""
            return jnp.where(state.together, jnp.sum(x * state.weight), x)

        of_row = jnp.where(live, state.offered, 0)
        offered = self._of_parts(
            jnp.where(state.drafted, 0, of_row), jnp.where(state.drafted, of_row, 0)
        )
        used = offered > 0
        rates = rates_after(
            state.rates,
            offered,
            jnp.maximum(block.count - 1, 0),
            self._of_parts(*params.prior),
            state.together,
        )
        expected = jnp.where(used, gains_of_parts(rates, jnp.maximum(offered, 1))[..., -1], 1.0)
        last = state.last
        if last is not None:
            width = min(last.text.shape[1], block.tokens.shape[1])
            text = last.text.at[:, :width].set(block.tokens[:, :width])
            last = dataclasses.replace(last, text=text, count=block.count)
        # A trial takes the place of what promised the most, which may be drafts of the other part.
        worth = tokens * state.worth
        paid = shared(worth) > shared(needed)
        ran = jnp.where(state.together, state.drafted.any(), state.drafted)
        promised = jnp.where(live[:, None], expected * state.worth[:, None], 0.0)
        pays = [shared(promised[:, at]) > shared(needed) for at in range(promised.shape[1])]

        def after(
            at: int, part: Proposer | None, own: ArrayTree, known: PartState | None
        ) -> PartState | None:
            if part is None or known is None:
                return None
            # Rows without drafts also took the time of a step with drafts.
            mine = used[:, at]
            waited = jnp.where(state.together, mine.any(), mine)
            saved = shared(jnp.where(waited, worth - needed, 0.0))
            trials = known.trials.after(shared(needed), saved, mine, state.tried, paid, pays[at])
            seen = part.observe(own, known.own, block)
            if part is self.drafter and state.waiting is not None:
                # What waits comes after the tokens of its last step.
                seen = _where(state.drafted.any(), seen, known.own)
            return PartState(seen, trials)

        rest = state.rest
        if rest is not None and params.awake is not None:
            any_used = (of_row > 0).any()
            saved = jnp.where(any_used, shared(jnp.where(live, worth - needed, 0.0)), 0.0)
            rest = rest.after(saved, params.awake)
        waiting = state.waiting
        if waiting is not None:
            waiting = waiting.after(block, ~state.drafted.any())
        drafter = after(-1, self.drafter, params.drafter, state.drafter)
        settling = state.settling
        if settling is not None and drafter is not None:
            settling = settling.after(pays[-1] & ~drafter.trials.barred)
        return dataclasses.replace(
            state,
            lookup=after(0, self.lookup, params.lookup, state.lookup),
            drafter=drafter,
            settling=settling,
            rates=rates,
            last=last,
            # The tokens of the last step are at hand for its next pass.
            missed=jnp.where(ran, 0, state.missed + block.count),
            waiting=waiting,
            rest=rest,
            text=None if state.text is None else state.text.append(block),
        )

    def resting(self, params: AdaptiveParams, state: AdaptiveState, alive: Array) -> Array | None:
        if state.rest is None:
            return None
        steps = jnp.where(params.forced == RESTS, LONGEST, state.rest.steps)
        steps = jnp.min(jnp.where(alive, steps, LONGEST))
        if state.waiting is not None:
            steps = jnp.minimum(steps, state.waiting.room())
        return jnp.where(params.forced >= 0, 0, steps)

    def lapse(self, params: AdaptiveParams, state: AdaptiveState, block: Block) -> AdaptiveState:
        # Its parts only take the tokens: nothing was drafted, so there is nothing to learn.
        lookup, drafter, waiting = state.lookup, state.drafter, state.waiting
        if lookup is not None and self.lookup is not None:
            own = self.lookup.observe(params.lookup, lookup.own, block)
            lookup = dataclasses.replace(lookup, own=own)
        if waiting is not None:
            waiting = waiting.after(block, jnp.bool_(True))
        elif drafter is not None and self.drafter is not None:
            own = self.drafter.rest(drafter.own)
            own = self.drafter.observe(params.drafter, own, block)
            drafter = dataclasses.replace(drafter, own=own)
        return dataclasses.replace(
            state,
            lookup=lookup,
            drafter=drafter,
            waiting=waiting,
            last=None if state.last is None else state.last.forgotten(),
            missed=state.missed + block.count,
            text=None if state.text is None else state.text.append(block),
        )

    def _look_up(
        self, params: AdaptiveParams, state: AdaptiveState, context: Context
    ) -> tuple[Proposal | None, AdaptiveState]:
        """Returns the drafts of the lookup.

        While an option is forced, rows without drafts repeat the pending token: the measured
        seconds are those of a step with drafts.
        """
        if self.lookup is None or state.lookup is None:
            return None, state
        found, own = self.lookup.propose(params.lookup, state.lookup.own, context)
        state = dataclasses.replace(state, lookup=dataclasses.replace(state.lookup, own=own))
        repeated = (found.parent == ABSENT) & (params.forced != MEASURED)
        tokens = jnp.where(repeated, context.pending[:, None], found.tokens)
        parent = jnp.where(repeated, tree.chain(found.tokens.shape[1]), found.parent)
        found = dataclasses.replace(found, tokens=tokens, parent=parent)
        more = self.num_nodes - found.tokens.shape[1]
        if more:
            tokens = jnp.pad(found.tokens, ((0, 0), (0, more)))
            parent = jnp.pad(found.parent, ((0, 0), (0, more)), constant_values=ABSENT)
            found = Proposal(tokens, parent, point_mass=found.point_mass)
        return found, state

    def _draft(
        self,
        params: AdaptiveParams,
        state: AdaptiveState,
        context: Context,
        depth: Array,
        wanted: Array,
    ) -> tuple[Proposal, AdaptiveState]:
        """Returns the drafts of the drafter, up to `depth`; a depth of 0 may leave it out."""
        drafter, known = self.drafter, state.drafter
        assert drafter is not None and known is not None
        context = dataclasses.replace(context, depth=depth)
        text = state.text
        if text is None and state.waiting is None:
            made, own = drafter.propose(params.drafter, known.own, context)
            return made, dataclasses.replace(state, drafter=dataclasses.replace(known, own=own))
        propose = functools.partial(drafter.propose, params.drafter, context=context)
        shapes, _ = jax.eval_shape(propose, known.own)
        # No row takes these numbers, since a depth of 0 is that of rows without its drafts.
        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        none = dataclasses.replace(none, tokens=none.tokens.at[:, 0].set(context.pending))
        runs = depth > 0
        if text is None:
            own, waiting = self._read_waiting(params, state, runs)
            state = dataclasses.replace(state, waiting=waiting)
        else:
            own = _where(runs, known.own, drafter.rest(known.own))

        def turn(carry: tuple[Proposal, ArrayTree]) -> tuple[Proposal, ArrayTree]:
            own = carry[1]
            if text is not None:
                own = drafter.resume(params.drafter, own, text.tokens, text.length, wanted)
            return propose(own)

        made, own = apply_if(runs, turn, (none, own))
        return made, dataclasses.replace(state, drafter=dataclasses.replace(known, own=own))

    def _read_waiting(
        self, params: AdaptiveParams, state: AdaptiveState, runs: Array
    ) -> tuple[ArrayTree, Waiting]:
        """Returns the drafter's state, and what still waits: nothing if it `runs` [] bool."""
        drafter, known, waiting = self.drafter, state.drafter, state.waiting
        assert drafter is not None and known is not None and waiting is not None
        due = (runs & (waiting.count > 0).any()) | waiting.is_full(self._of_step)

        def turn(own: ArrayTree) -> ArrayTree:
            caught = drafter.catch_up(params.drafter, own)
            if caught is None:
                raise TypeError(
                    f"{type(drafter).__name__} has waits=True, and its catch_up returns None: "
                    "return the state from which read goes on, or set waits=False"
                )
            return drafter.read(params.drafter, caught, waiting.block)

        return apply_if(due, turn, known.own), waiting.emptied(due)


def _where(wanted: Array, new: ArrayTree, old: ArrayTree) -> ArrayTree:
    """Returns `new` where `wanted` [] bool; what is the same in both, such as a cache, is kept."""
    return cast(
        ArrayTree,
        jax.tree.map(lambda a, b: a if a is b else jnp.where(wanted, a, b), new, old),
    )


def _count(chain: Proposal | None) -> Array:
    """Returns [B] the number of drafts of each chain."""
    if chain is None:
        return jnp.zeros((), jnp.int32)
    return (chain.parent != ABSENT).sum(1, dtype=jnp.int32)


def _either(takes_made: Array, made: Proposal, found: Proposal) -> Proposal:
    """Returns for each row `made` or `found`, where the drafts of `found` are point masses."""
    if made.logits is not None:
        found = with_logits(found, made.logits.shape[-1])

    def choose(a: Array, b: Array) -> Array:
        return jnp.where(takes_made.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return Proposal(
        choose(made.tokens, found.tokens),
        choose(made.parent, found.parent),
        None if made.logits is None or found.logits is None else choose(made.logits, found.logits),
        made.point_mass and found.point_mass,
    )


def _waited(known: PartState | None, able: Array, used: Array) -> PartState | None:
    if known is None:
        return None
    return dataclasses.replace(known, trials=known.trials.waited(able, used))
