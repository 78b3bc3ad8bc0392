"""`Learner`: one kind of drafter, as the job `train.drafter` trains it."""

from __future__ import annotations

import abc
import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.methods import PublishedSource, SharedParams, head_of
from specjax.types import Weights


@struct.dataclass
class Drafts:
    """Texts, and the positions at which drafts start."""

    tokens: Array  # [B, T + 1]
    learned: Array  # [B, T] 1 where the next token is learned
    anchors: Array  # [B, A]
    present: Array  # [B, A] 1, or 0 for an anchor that only fills a row up


@struct.dataclass
class Lesson:
    """The inputs that a drafter may read of a batch.

    An anchor is the position of a token that is pending, as it is when a draft starts: the target
    has read the tokens before it, and their features are known.
    """

    tokens: Array  # [B, T + 1]
    learned: Array  # [B, T] 1 where the next token is learned
    features: Array  # [B, T, F] the target's hidden states at the taps
    anchors: Array  # [B, A]
    present: Array  # [B, A] 1, or 0 for an anchor that only fills a row up

    def weight(self, depth: int) -> Array:
        """Returns [B, A] the weight of the guess: 1 if the tokens up to its depth are learned."""
        ahead = self.anchors[:, :, None] + jnp.arange(depth + 1)
        inside = ahead < self.learned.shape[1]
        rows = jnp.arange(len(ahead))[:, None, None]
        seen = self.learned[rows, jnp.minimum(ahead, self.learned.shape[1] - 1)]
        return self.present * jnp.prod(seen * inside, axis=2)


@struct.dataclass
class Guess:
    """The drafter's predictions of one depth, A of them in each row.

    The target predicts the same tokens from its hidden states at the positions `at`, so the token
    at `at + 1` is the label.
    """

    hidden: Array  # [B, A, E] that the matrix of `Learner.head` takes
    at: Array  # [B, A]; may exceed the batch where the weight is 0
    weight: Array  # [B, A]
    # [B, A] the drafter's own estimate of the probability that the draft is accepted; None: none.
    confidence: Array | None = None
    depth: int = struct.field(pytree_node=False, default=0)


@dataclasses.dataclass(frozen=True, eq=False)
class Learner(abc.ABC):
    """A drafter's network while it is trained.

    Attributes:
      source: proposes with the trained parameters, in a decoder.
      objective: the loss by default, a key of `OBJECTIVES`.
      decay: the weight of a depth's loss by default, relative to the depth before.
      own_head: True if the drafter has an output matrix of its own, which is trained.
      softcap: of the drafter's logits.
    """

    source: PublishedSource
    objective: str
    decay: float
    own_head: bool
    softcap: float | None = None

    @abc.abstractmethod
    def init(self, key: Array) -> Weights:
        """Returns random parameters of the network; the job adds a head."""

    @abc.abstractmethod
    def guesses(self, params: SharedParams, lesson: Lesson) -> list[Guess]:
        """Returns the predictions of all depths."""

    def head(self, params: SharedParams) -> Array:
        """Returns [E, U] the matrix that makes logits from `Guess.hidden`."""
        return head_of(params)

    @property
    def trains_head(self) -> bool:
        """True if `head` has a gradient."""
        return self.own_head

    @property
    def estimates(self) -> bool:
        """True if the guesses have a `confidence`."""
        return False


def draw_anchors(keys: Array, learned: Array, count: int) -> tuple[Array, Array]:
    """Returns random positions [B, A] whose next token is `learned` [B, T], each at most once.

    They are at least 1 and ascend.  The second result [B, A] says which are valid: a row may have
    fewer.  `keys` [B] are those of the rows.
    """
    usable = learned.at[:, 0].set(0)  # a draft reads the features of a token before it
    drawn = jax.vmap(lambda key: jax.random.uniform(key, learned.shape[1:]))(keys)
    _, at = jax.lax.top_k(drawn + 2 * usable, count)
    at = jnp.sort(at, axis=1)
    return jnp.maximum(at, 1), jnp.take_along_axis(usable, at, axis=1)
