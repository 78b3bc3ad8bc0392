"""`NGram`: prompt lookup, copies the tokens after an earlier occurrence of the last tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax import tree
from specjax._internal.checks import flag, within
from specjax._internal.prefix_sums import leading
from specjax.contract import Context, Proposer
from specjax.proposers.own_text import OwnText
from specjax.proposers.shapes import check_num_drafts
from specjax.sampling import argmax
from specjax.types import ABSENT, Block, Proposal


@dataclasses.dataclass(frozen=True)
class NGram(Proposer[None, OwnText]):
    """Copies the tokens after the most recent earlier occurrence of the longest matching suffix.

    Suffixes of `max_ngram` tokens are tried first, then shorter ones down to `min_ngram`.  A
    continuation that reaches the end of the text starts again after the match: after "a b a b" the
    drafts are "a b a ...".

    The documents of a row (`Block.documents`) are searched as well, like earlier parts of its text.

    Rows without a match have no drafts.  If no row has a match, the target reads only the pending
    tokens, as in plain decoding.  With `may_abstain=False` every pass has the same width, so that
    its logits have the same bits.

    With `drawn` the first draft is not that of the most recent match: it is drawn from the tokens
    that follow all matches of this length, with the noise of the rule.  Under `match` it is then
    the target's token as often as the two distributions allow (Daliri et al. 2024, arXiv
    2408.07978, theorem 1); the other drafts copy what follows its most recent match.  Texts are
    exact, as always.  It suits documents that are samples themselves, such as old rollouts.

    Reference: Saxena 2023, "Prompt lookup decoding".

    Example:
      >>> specjax.generate(target, prompt, proposer=NGram(num_drafts=8))
    """

    num_drafts: int = 4
    max_ngram: int = 4
    min_ngram: int = 2
    may_abstain: bool = True
    drawn: bool = False
    is_chain = True
    point_mass = True
    reads_documents = True

    def __post_init__(self) -> None:
        check_num_drafts(self.num_drafts)
        within("max_ngram", self.max_ngram, 1)
        within("min_ngram", self.min_ngram, 1, self.max_ngram, ", the max_ngram")
        flag("drawn", self.drawn)
        narrower = (1,) if flag("may_abstain", self.may_abstain) else ()
        self.declare(num_nodes=self.num_drafts + 1, max_depth=self.num_drafts, narrower=narrower)

    def init(self, params: None, prompt: Block, capacity: int) -> OwnText:
        return OwnText.empty(prompt, capacity, self.num_nodes)

    def truncate(self, state: OwnText, count: Array, last: Array | None) -> OwnText:
        return state.first(count)

    def propose(self, params: None, state: OwnText, context: Context) -> tuple[Proposal, OwnText]:
        noise = None
        if self.drawn:
            node = jnp.zeros(1, jnp.int32)
            noise = context.noise(node, node)[:, 0]
        rows = state.tokens, state.length, context.pending, noise
        tokens, parent = jax.vmap(self._look_up)(*rows)
        return Proposal(tokens, parent, point_mass=True), state

    def observe(self, params: None, state: OwnText, block: Block) -> OwnText:
        return state.append(block)

    def _look_up(
        self, text: Array, length: Array, pending: Array, noise: Array | None = None
    ) -> tuple[Array, Array]:
        """Returns tokens and parents [N] of one row; `noise` [V] draws the first draft.

        The suffix ends with the pending token, which is put into slot `length`.
        """
        slot = jnp.arange(len(text))
        text = jnp.where(slot == length, pending, text)
        last = text[jnp.maximum(length - jnp.arange(self.max_ngram), 0)]
        before = jnp.pad(text, (self.max_ngram - 1, 0), constant_values=ABSENT)
        # same[i]: how many tokens up to slot i agree with the end of the text, at most max_ngram.
        same, still = jnp.zeros_like(slot), jnp.ones_like(slot, bool)
        for back in range(self.max_ngram):
            first = self.max_ngram - 1 - back
            here = (before[first : first + len(text)] == last[back]) & (last[back] != ABSENT)
            still = still & here & (length >= back)
            same = same + still
        same = jnp.where((slot < length) & (same >= self.min_ngram), same, 0)
        # The longest match, and the most recent one of equal length.
        matches = (same == same.max()) & (same > 0)
        if noise is not None:
            follows = jnp.roll(text, -1)
            counts = jnp.zeros_like(noise).at[follows].add(matches & (follows != ABSENT))
            matches &= follows == argmax(jnp.log(counts) + noise)
        at = jnp.max(jnp.where(matches, slot, -1))
        drafts = text[at + 1 + jnp.arange(self.num_drafts) % jnp.maximum(length - at, 1)]
        # Drafts end where a document does.
        present = jnp.append(False, leading(drafts != ABSENT) & (at >= 0))
        parent = jnp.where(present, tree.chain(self.num_nodes), ABSENT)
        return jnp.append(pending, jnp.maximum(drafts, 0)), parent
