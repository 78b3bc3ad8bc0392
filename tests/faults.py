"""Deliberately wrong proposers, rules and decoders: bugs of shipped engines that tests must
catch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from table_model import TokenCache

from specjax import Decoder, Rejection, Sampling, sampling
from specjax.methods import DraftSource
from specjax.proposers import Chain, StaticTree
from specjax.rules import rejection
from specjax.types import ABSENT


def drafting(kind, model, vocab_size, num_drafts):
    """A chain of class `kind` over a draft model."""
    return kind(DraftSource(model, vocab_size), num_drafts)


def _noise(draw, node):
    """[V]: the noise with which the children of one node are drawn."""
    return draw.noise(node[None], jnp.zeros(1, jnp.int32))[0]


@struct.dataclass
class Silent:
    """Declares independent noise but returns zeros, so that the drafts are the draft's best
    tokens."""

    key: Any
    size: int = struct.field(pytree_node=False)

    def noise(self, node, depth):
        return jnp.zeros((len(node), self.size))


@dataclasses.dataclass(frozen=True)
class ArgmaxDraft(Chain):
    """Drafts the best tokens, but reports the soft distribution that they were not drawn from."""

    def propose(self, params, state, context):
        silent = Silent(context.draw.key, context.draw.size)
        return super().propose(params, state, dataclasses.replace(context, draw=silent))


@struct.dataclass
class Repeated:
    """Uses the root's noise at every node."""

    inner: Any

    def noise(self, node, depth):
        return self.inner.noise(jnp.zeros_like(node), jnp.zeros_like(depth))


@dataclasses.dataclass(frozen=True)
class RepeatedNoise(Chain):
    """Draws a whole chain with the same noise."""

    def propose(self, params, state, context):
        return super().propose(
            params, state, dataclasses.replace(context, draw=Repeated(context.draw))
        )


@dataclasses.dataclass(frozen=True)
class DropsUnlikely(Chain):
    """Drops a draft if it turns out to be unlikely."""

    def propose(self, params, state, context):
        proposal, state = super().propose(params, state, context)
        chance = jnp.take_along_axis(
            jax.nn.softmax(proposal.logits[:, 0]), proposal.tokens[:, 1:2], axis=1
        )
        return proposal.replace(parent=jnp.where(chance < 0.2, -1, proposal.parent)), state


class ReusedNoise(Rejection):
    """Draws the residual token with the noise that drew the rejected draft."""

    def __call__(self, draw, proposal, tree, logits):
        verdict = super().__call__(draw, proposal, tree, logits)
        node, residual, _ = rejection.walk(
            draw.acceptance(len(proposal.tokens)),
            proposal,
            jax.nn.softmax(logits),
            jax.nn.softmax(proposal.logits),
        )
        return verdict.replace(next_token=sampling.argmax(jnp.log(residual) + _noise(draw, node)))


class SharedAcceptance(Rejection):
    """Accepts with the noise that drew the draft."""

    def __call__(self, draw, proposal, tree, logits):
        @dataclasses.dataclass
        class Coupled:
            residual = draw.residual

            def acceptance(self, num_nodes):
                above = jnp.maximum(proposal.parent, 0)
                noise = draw.noise(above, jnp.zeros_like(above))
                return jnp.exp(-jnp.exp(-noise[jnp.arange(num_nodes), proposal.tokens]))

        return super().__call__(Coupled(), proposal, tree, logits)


class NoResidual(Rejection):
    """Draws the next token from the target even after a rejection."""

    def __call__(self, draw, proposal, tree, logits):
        verdict = super().__call__(draw, proposal, tree, logits)
        return verdict.replace(next_token=sampling.argmax(logits[verdict.node] + draw.residual()))


class ResidualBonus(Rejection):
    """Draws a residual token from the draft's last distribution even after full acceptance."""

    def __call__(self, draw, proposal, tree, logits):
        verdict = super().__call__(draw, proposal, tree, logits)
        left = jnp.maximum(jax.nn.softmax(logits[-1]) - jax.nn.softmax(proposal.logits[-1]), 0)
        instead = sampling.argmax(jnp.log(left) + draw.residual())
        return verdict.replace(
            next_token=jnp.where(verdict.node == len(logits) - 1, instead, verdict.next_token)
        )


class EmptyResidual(Rejection):
    """Rounds its uniform draws, so that 1 occurs, and then divides a residual by its sum of 0."""

    def __call__(self, draw, proposal, tree, logits):
        class Rounded:
            residual = draw.residual

            def acceptance(self, num_nodes):
                return draw.acceptance(num_nodes).astype(jnp.bfloat16).astype(jnp.float32)

        verdict = super().__call__(Rounded(), proposal, tree, logits)
        node = verdict.node
        left = jnp.maximum(jax.nn.softmax(logits[node]) - jax.nn.softmax(proposal.logits[node]), 0)
        residual = sampling.argmax(jnp.log(left / left.sum()) + draw.residual())
        return verdict.replace(
            next_token=jnp.where(node < len(logits) - 1, residual, verdict.next_token)
        )


TOP_K = 2
HOT, TOP_P = 1.6, 0.7
"""Settings that these rules know of, since their decoder, `Unwarped`, gives them bare logits."""


def _most(logits):
    return logits >= jnp.sort(logits, axis=-1)[..., -TOP_K, None]


class BonusOnly(Rejection):
    """Applies top-k to the bonus token only."""

    def __call__(self, draw, proposal, tree, logits):
        verdict = super().__call__(draw, proposal, tree, logits)
        bonus = sampling.argmax(
            jnp.where(_most(logits[-1]), logits[-1], -jnp.inf) + draw.residual()
        )
        return verdict.replace(
            next_token=jnp.where(verdict.node == len(logits) - 1, bonus, verdict.next_token)
        )


class FrozenAtTheRoot(Rejection):
    """Computes the allowed tokens at the root and uses them for the whole block."""

    def __call__(self, draw, proposal, tree, logits):
        return super().__call__(draw, proposal, tree, jnp.where(_most(logits[0]), logits, -jnp.inf))


class TopPFirst(Rejection):
    """Applies top-p before the temperature."""

    def __call__(self, draw, proposal, tree, logits):
        order = jnp.argsort(-logits, axis=-1)
        best = jnp.take_along_axis(jax.nn.softmax(logits), order, axis=-1)
        before = jnp.take_along_axis(
            jnp.cumsum(best, axis=-1) - best, jnp.argsort(order, axis=-1), axis=-1
        )
        return super().__call__(
            draw, proposal, tree, jnp.where(before < TOP_P, logits, -jnp.inf) / HOT
        )


@dataclasses.dataclass(frozen=True)
class ShortCache(Chain):
    """Does not read its own last draft after full acceptance."""

    def observe(self, params, state, block):
        return super().observe(
            params, state, block.replace(count=jnp.minimum(block.count, self.num_drafts))
        )


@dataclasses.dataclass(frozen=True)
class Faulty(Decoder):
    """A decoder with a fault before or after its step, in its noise, or in its warp."""

    def before(self, state):
        """The state that a step sees."""
        return state

    def after(self, state, after, info):
        """What a step made of `state`."""
        return after

    def before_draw(self, state):
        """The state of which the noise is made."""
        return state

    def after_draw(self, state, draw):
        return draw

    def path(self, state, path):
        """The tokens by which a node's logits are processed."""
        return path

    def step(self, params, state):
        after, info = super().step(params, self.before(state))
        after = after.replace(sampling=state.sampling, eos=state.eos)
        return self.after(state, after, info), info

    def _draw(self, state, *more):
        return self.after_draw(state, super()._draw(self.before_draw(state), *more))

    def _warp(self, state, logits, path=None):
        return super()._warp(state, logits, None if path is None else self.path(state, path))


class Unwarped(Faulty):
    """Warps nothing but temperature 0 and leaves everything else to its rule."""

    def before(self, state):
        temperature = state.sampling.temperature
        bare = Sampling.create(len(temperature)).replace(
            temperature=jnp.minimum(jnp.sign(temperature), 1.0)
        )
        return state.replace(sampling=bare)


class MixedUp(Faulty):
    """Is greedy only if the whole batch is."""

    def before(self, state):
        temperature = state.sampling.temperature
        floor = jnp.where((temperature > 0).any(), jnp.maximum(temperature, 0.7), temperature)
        return state.replace(sampling=state.sampling.replace(temperature=floor))


class EndsWithBlocks(Faulty):
    """Looks for EOS only at the end of a block."""

    def before(self, state):
        return state.replace(eos=jnp.full_like(state.eos, -1))

    def after(self, state, after, info):
        last = jnp.take_along_axis(after.tokens, after.length[:, None] - 1, axis=1)
        return after.replace(done=after.done | (last == state.eos).any(1))


class CountsPastTheEnd(Faulty):
    """Counts drafts as accepted that EOS or a limit cuts off."""

    def after(self, state, after, info):
        accepted = state.stats.accepted + jnp.where(state.done, 0, info.num_accepted)
        return after.replace(stats=after.stats.replace(accepted=accepted))


class CountsPadding(Faulty):
    """Counts passes of rows that are done."""

    def after(self, state, after, info):
        passes = state.stats.target_passes + 1
        return after.replace(stats=after.stats.replace(target_passes=passes))


class PaddingTemperature(Faulty):
    """Packs the temperatures of live rows together, but not the rows."""

    def before(self, state):
        packed = state.sampling.temperature[jnp.argsort(state.done, stable=True)]
        return state.replace(sampling=state.sampling.replace(temperature=packed))


class HalvedKey(Faulty):
    """Two positions share their random numbers, unless noise is shared."""

    def before_draw(self, state):
        halved = dataclasses.replace(state.cache, length=state.cache.length // 2)
        return state.replace(cache=halved)


class KeyOfTheRow(Faulty):
    """Folds the row's place in the batch into its key."""

    def before_draw(self, state):
        rows = jnp.arange(len(state.length))
        return state.replace(key=jax.vmap(jax.random.fold_in)(state.key, rows))


class FirstRowDecides(Faulty):
    """Draws no noise if the first row is greedy."""

    def after_draw(self, state, draw):
        if not hasattr(draw, "gumbel"):
            return draw
        return draw.replace(gumbel=jnp.where(state.sampling.temperature[0] == 0, 0, draw.gumbel))


class PenaltiesAtTheRoot(Faulty):
    """Applies logits processors to every node as if it had no drafts before it."""

    def path(self, state, path):
        return jnp.full_like(path, ABSENT)


class SharedResidual(Rejection):
    """Draws the residual token with the random bits of the acceptance draws."""

    def __call__(self, draw, proposal, tree, logits):
        bits = jax.random.gumbel(draw._stream(1), (draw.size,), jnp.float32)

        class Merged:
            acceptance = draw.acceptance

            def residual(self):
                return bits

        return super().__call__(Merged(), proposal, tree, logits)


@dataclasses.dataclass(frozen=True)
class RawQ(Chain):
    """Draws from the warped distribution, but reports the raw one."""

    def propose(self, params, state, context):
        raw = []

        def warp(logits, path=None):
            raw.append(logits[:, 0].astype(jnp.float32))
            return context.warp(logits, path)

        proposal, state = super().propose(params, state, dataclasses.replace(context, warp=warp))
        return proposal.replace(logits=jnp.stack([*raw, raw[-1]], axis=1)), state


@dataclasses.dataclass(frozen=True)
class UnwarpedDraft(Chain):
    """Draws from the raw distribution and says so, which is exact but slow."""

    def propose(self, params, state, context):
        def warp(logits, path=None):
            greedy = context.warp(logits, path)
            one = (greedy > -jnp.inf).sum(-1, keepdims=True) == 1
            return jnp.where(one, greedy, logits.astype(jnp.float32))

        return super().propose(params, state, dataclasses.replace(context, warp=warp))


@dataclasses.dataclass(frozen=True)
class ReversedSiblings(StaticTree):
    """Lists the last siblings in the reverse of the order in which they were drawn."""

    def propose(self, params, state, context):
        proposal, state = super().propose(params, state, context)
        last, children = self._widths[-1], self.branching[-1]
        leaves = proposal.tokens[:, -last:].reshape(-1, last // children, children)[..., ::-1]
        tokens = proposal.tokens.at[:, -last:].set(leaves.reshape(-1, last))
        return proposal.replace(tokens=tokens), state


@dataclasses.dataclass(frozen=True)
class OtherRowsAboveTwo(Chain):
    """From the third row on it reports the distributions of the row before."""

    def propose(self, params, state, context):
        proposal, state = super().propose(params, state, context)
        row = jnp.arange(len(proposal.tokens))[:, None, None]
        others = jnp.roll(proposal.logits, 1, axis=0)
        return proposal.replace(logits=jnp.where(row < 2, proposal.logits, others)), state


@dataclasses.dataclass(frozen=True)
class OtherGroupsSlots(Chain):
    """Reads the cache of its draft model by the slots of another group of layers, which hold the
    tokens one later."""

    def propose(self, params, state, context):
        proposal, state = super().propose(params, self._moved(state, 1), context)
        return proposal, self._moved(state, -1)

    def _moved(self, state, by):
        def move(x):
            return x.replace(tokens=jnp.roll(x.tokens, by, axis=1)) if self._holds(x) else x

        return jax.tree.map(move, state, is_leaf=self._holds)

    @staticmethod
    def _holds(x):
        return isinstance(x, TokenCache)


class PrefixWithDrafts(Faulty):
    """Every second row begins from a copy of a cache that was made between a draft and its
    rejection: the last token that was read is another one."""

    def prefill(self, params, prompt, prompt_length, **more):
        rows = np.arange(len(prompt))
        at = np.maximum(prompt_length - 2, 0)
        copied = (rows % 2 == 1) & (prompt_length > 1)
        drafted = prompt.copy()
        other = (prompt[rows, at] + 1) % self.target.vocab_size
        drafted[rows, at] = np.where(copied, other, prompt[rows, at])
        state = super().prefill(params, drafted, prompt_length, **more)
        return state.replace(tokens=state.tokens.at[rows, at].set(prompt[rows, at]))


class CorruptsSomeTexts(Faulty):
    """In one of a hundred texts the last token of the first step is another one."""

    def after(self, state, after, info):
        drawn = jax.vmap(lambda key: jax.random.randint(jax.random.fold_in(key, 77), (), 0, 100))(
            state.key
        )
        last = jnp.take_along_axis(after.tokens, after.length[:, None] - 1, axis=1)[:, 0]
        ended = (last[:, None] == state.eos).any(1)
        chosen = (drawn == 0) & (state.stats.emitted == 0) & ~state.done & ~ended
        other = (last + 1) % (self.target.vocab_size - 1)
        rows = jnp.arange(len(last))
        tokens = after.tokens.at[rows, after.length - 1].set(jnp.where(chosen, other, last))
        return after.replace(tokens=tokens)


class KeepsTheBlock(Faulty):
    """Keeps a token of the block behind an EOS."""

    def after(self, state, after, info):
        last = jnp.take_along_axis(after.tokens, after.length[:, None] - 1, axis=1)
        inside = (last == state.eos).any(1) & (info.num_accepted + 1 > info.count) & ~state.done
        length = after.length + (inside & (after.length < state.limit))
        return after.replace(length=length)
