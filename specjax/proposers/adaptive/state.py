"""The parameters of an `Adaptive` proposer, and its state between two steps."""

from __future__ import annotations

import jax
from flax import struct
from jax import Array

from specjax.contract import ArrayTree
from specjax.proposers.adaptive.rates import Rates
from specjax.proposers.adaptive.rest import Rest
from specjax.proposers.adaptive.settling import Settling
from specjax.proposers.adaptive.tree_gains import ChainGains, LastTree, TreeGains
from specjax.proposers.adaptive.trials import Trials
from specjax.proposers.own_text import OwnText
from specjax.proposers.waiting import Waiting

MEASURED = -1
"""The value of `AdaptiveParams.forced` with which measured seconds choose the option."""

RESTS = -2
"""The value of `AdaptiveParams.forced` with which it rests as often as it can, and never drafts."""


@struct.dataclass
class AdaptiveParams:
    """Parameters of an `Adaptive` proposer."""

    lookup: ArrayTree
    drafter: ArrayTree
    seconds: Array  # [O], or by context [C, O], of a step with each of `Adaptive.options`, any unit
    forced: Array  # [] int32: the option that every step takes, `MEASURED` or `RESTS`
    prior: Array  # [2] acceptance rates of lookup and drafter before any draft of a row was judged
    pause: Array  # [2] int32: steps before the first trial of each, if by `prior` it will not pay
    # [] the time that drafts saved per step in earlier texts, and the time that choosing takes,
    # both in steps of plain decoding; None: it never rests
    saved: Array | None = None
    awake: Array | None = None
    contexts: Array | None = None  # [C] int32, ascending: the longest text of each row of `seconds`
    # [W, 2] for a drafter of trees: what trees, and chains, of each width gave in earlier texts
    trees: Array | None = None
    chains: Array | None = None

    def seconds_at(self, length: Array | None) -> Array:
        """Returns [..., O]: the seconds for texts of so many tokens [...]; None: for the shortest.

        It is the first row whose context is at least the length, or the last row.  Without
        `contexts` there is one row, [O].
        """
        if self.contexts is None:
            return self.seconds
        if length is None:
            return self.seconds[0]
        row = (length[..., None] > self.contexts[:-1]).sum(-1)
        return self.seconds[row]


@struct.dataclass
class PartState:
    """The state of the lookup or of the drafter."""

    own: ArrayTree  # its state as a proposer
    trials: Trials


@struct.dataclass
class AdaptiveState:
    """The state of an `Adaptive` proposer between two steps."""

    lookup: PartState | None
    drafter: PartState | None
    rates: Rates  # [B, P, ...] of the lookup and the drafter, of those that exist
    text: OwnText | None  # for a drafter that resumes
    waiting: Waiting | None  # for another one that can be left out of steps
    offered: Array  # [B] drafts of the last step
    drafted: Array  # [B] bool: were they those of `drafter`?
    missed: Array  # [B] tokens since the last drafts of `drafter`
    needed: Array  # [B] new tokens of a row with which the last step pays
    worth: Array  # [B] the time that a token took otherwise, in steps without drafts
    weight: Array  # [B] of each row's tokens, where all rows take one option
    tried: Array  # [B] bool: was the last step a trial?
    together: Array  # [B] bool: do all rows take one option?
    rest: Rest | None  # where it can rest
    settling: Settling | None  # where it can keep its choice
    trees: TreeGains | None  # of a drafter of trees
    chains: ChainGains | None  # of its chains, if they are options
    last: LastTree | None

    @property
    def parts(self) -> list[int]:
        """Those that exist of the lookup (0) and the drafter (1)."""
        return [i for i, part in enumerate((self.lookup, self.drafter)) if part is not None]


gains_of_parts = jax.vmap(Rates.gains, 1, 1)
rates_after = jax.vmap(Rates.after, (1, 1, None, 0, None), 1)
"""Updates the rates of all proposers at once, since an operation on two takes as long as on one."""
