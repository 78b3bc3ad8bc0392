"""`Rule`: decides which drafts are accepted."""

from __future__ import annotations

import abc
from typing import ClassVar

from jax import Array

from specjax.tree import Tree
from specjax.types import Draw, Proposal, Verdict


class Rule(abc.ABC):
    """Decides which drafts of ONE row are accepted; the decoder vmaps it.

    A rule with numbers is a `flax.struct.dataclass`: its numbers are data, so another threshold
    does not recompile, and each row may have its own.
    """

    exact: ClassVar[bool]
    """True if the emitted text has the target's distribution."""

    shared_noise: ClassVar[bool]
    """True if proposer and rule draw with the same position-keyed noise."""

    wants_logits: ClassVar[bool] = False
    """True if the rule needs `Proposal.logits`, the distributions that drafts were drawn from."""

    chain_only: ClassVar[bool] = False
    """True if the rule judges chains only."""

    by_node: ClassVar[bool] = False
    """True if the rule only compares drafts with a token that it draws after each node, as
    argmax(logits + noise), and `walk` finds the last draft that agrees."""

    @classmethod
    def fixes_text(cls) -> bool:
        """Returns whether a text depends on its key only, and not on the drafts."""
        return cls.exact and cls.shared_noise

    def __init_subclass__(cls, **named: object) -> None:
        super().__init_subclass__(**named)
        missing = [name for name in ("exact", "shared_noise") if not hasattr(cls, name)]
        if missing:
            raise TypeError(
                f"{cls.__name__} must set {' and '.join(missing)}, each to True or False"
            )

    @abc.abstractmethod
    def __call__(self, draw: Draw, proposal: Proposal, tree: Tree, logits: Array) -> Verdict:
        """Judges one row.

        Args:
          draw: the randomness of this step, shared with the proposer if `shared_noise`.
          proposal: tokens [N], parent [N], and logits [N, V] where `wants_logits`.
          tree: depth [N], ancestors [N, N] and paths [N, D + 1] of the proposal's nodes.
          logits: [N, V] float32, the target's warped logits after each node.
        """

    def walk(self, proposal: Proposal, wanted: Array) -> Verdict:
        """Judges one row from the token [N] after each node; for a rule that is `by_node`."""
        raise NotImplementedError(f"{type(self).__name__} sets by_node=True and lacks walk")
