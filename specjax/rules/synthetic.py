"""`SyntheticAcceptance`: accept a number of drafts that was asked for, to measure speed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax import sampling
from specjax._internal.checks import number, shown
from specjax.contract import Draw, Rule
from specjax.rules.confidence import check_fraction
from specjax.tree import Tree
from specjax.types import Proposal, Verdict


@struct.dataclass
class SyntheticAcceptance(Rule):
    """A lossy rule for measurements: it accepts as many drafts as asked, right or wrong.

    The text is worthless.  What it costs is real: drafts are made and verified, accepted positions
    keep the draft's own tokens, and the caches hold them.  So a drafter can be timed at the
    acceptance that another one, or a published table, has.  Pass one of the two numbers.  Both are
    data, so another one does not recompile.

    In a tree the first child of each accepted node is judged.  Drafts that a proposer does not make
    cannot be accepted: prompt lookup without a match, or a limit, makes the measured length less.

    Attributes:
      rate: in [0, 1], the probability that a draft is accepted after its parent was.
      length: at least 1, the mean number of tokens of a pass, the target's own token included, as
        in vLLM's `synthetic_acceptance_length`.  A pass accepts floor(length - 1) drafts, and one
        more with the probability of the fraction: no other schedule has a lower variance.

    Raises:
      ValueError: both or none of the numbers, or one outside of its interval.

    Example:
      >>> fast = SyntheticAcceptance(length=2.6)
      >>> specjax.generate(target, prompt, draft=draft, synthetic_acceptance=fast)
    """

    rate: float | None = None
    length: float | None = None

    exact = False
    shared_noise = False

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.length is None):
            raise ValueError(
                f"SyntheticAcceptance has rate={shown(self.rate)} and length={shown(self.length)}; "
                "pass one of them: rate=0.7, or length=2.6 tokens a pass"
            )
        if self.rate is not None:
            check_fraction(rate=self.rate)
        # JAX builds a pytree again from tracers, and from arrays on a device.
        elif isinstance(self.length, int | float | str | np.ndarray | np.generic):
            for each in np.ravel(self.length).tolist():
                tokens = number(each)
                if tokens is None or not 1 <= tokens < float("inf"):
                    raise ValueError(
                        f"length={shown(each)} is not allowed; it is the mean number of tokens of "
                        "a pass, the target's own included: at least 1"
                    )

    def check_depth(self, most: int) -> None:
        """Raises ValueError if `most` drafts of a pass are too few, or there are none."""
        if most == 0:
            raise ValueError(
                f"synthetic_acceptance={self} accepts drafts, and nothing drafts here: pass "
                "a draft, a drafter or a proposer"
            )
        if isinstance(self.length, int | float) and self.length > most + 1:
            raise ValueError(
                f"synthetic_acceptance: length={shown(self.length)} is more than the "
                f"{most + 1} tokens that a pass with {most} drafts can give: draft "
                f"deeper, or pass length={most + 1} or less"
            )

    def constant(self) -> Rule:
        """Returns the rule with its numbers in the program, for a state without a rule's arrays."""
        return _Constant(self.rate, self.length)

    def __call__(self, draw: Draw, proposal: Proposal, tree: Tree, logits: Array) -> Verdict:
        num_nodes = len(proposal.tokens)
        uniform = draw.acceptance(num_nodes)
        if self.rate is not None:
            keeps = uniform < self.rate
        else:
            drafts = jnp.asarray(self.length) - 1
            keeps = tree.depth <= jnp.floor(drafts) + (uniform[0] < drafts % 1)

        def visit(carry: tuple[Array, Array], n: Array) -> tuple[tuple[Array, Array], None]:
            node, ended = carry
            here = (proposal.parent[n] == node) & ~ended
            return (jnp.where(here & keeps[n], n, node), ended | (here & ~keeps[n])), None

        start = (jnp.int32(0), jnp.bool_(False))
        (node, _), _ = jax.lax.scan(visit, start, jnp.arange(1, num_nodes, dtype=jnp.int32))
        return Verdict(node, sampling.argmax(logits[node] + draw.residual()))


@dataclasses.dataclass(frozen=True)
class _Constant(Rule):
    """The rule with numbers that are no arrays."""

    rate: float | None
    length: float | None

    exact = False
    shared_noise = False

    def __call__(self, draw: Draw, proposal: Proposal, tree: Tree, logits: Array) -> Verdict:
        return SyntheticAcceptance(self.rate, self.length)(draw, proposal, tree, logits)
