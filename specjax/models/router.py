"""`Router`: how the experts of a token are chosen and weighted, from one logit for each expert."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax._internal.checks import chosen, flag, real, settle, whole

SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "sparsemixer")
"""The functions from logits to scores, computed in float32:

softmax       over all experts, or over the chosen ones
sigmoid       of each logit
sqrtsoftplus  the square root of log(1 + exp(logit))
sparsemixer   a softmax for each of two experts, over the logits near the greatest one (Liu et al.
              2024, arXiv 2409.12136)
"""

_LEAST_SUM = 1e-20  # is added to the sum of weights before they are divided by it


@dataclasses.dataclass(frozen=True)
class Router:
    """The rule by which a layer chooses `experts_per_token` experts, and the weight of each.

    The experts with the greatest scores are chosen, and their scores are the weights.
    `TransformerConfig.normalise_experts` says whether the weights are divided by their sum.
    """

    scores: str = "softmax"
    # The logits choose, and only the logits of the chosen experts have scores (gpt-oss, Llama 4).
    of_chosen: bool = False
    # A learned number for each expert is added to the score that chooses, and not to the weight
    # (Wang et al. 2024, arXiv 2408.15664).
    corrected: bool = False
    # Experts are cut into groups, and only those of `kept_groups` groups may be chosen.  The score
    # of a group is the sum of its `group_best` best, which are one in DeepSeek-V2 and two in
    # DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2
    scale: float = 1.0  # of the weights, after they are divided by their sum
    bias: bool = False  # of the logits
    on_input: bool = False  # the weight multiplies the input of an expert instead of its output
    expert_scale: bool = False  # a learned factor for the weight of each expert
    # The router reads x / rms(x), times a learned vector, times hidden_size ** -0.5 (Gemma 4).
    normed_input: bool = False
    # sparsemixer: a logit is near the greatest one m if (m - logit) / max(|logit|, m) is at most
    # twice this number.
    jitter: float = 0.01

    def __post_init__(self) -> None:
        """Raises ValueError with the field, its value and the allowed values."""
        chosen("scores", self.scores, SCORES)
        for name in ("of_chosen", "corrected", "bias", "on_input", "expert_scale", "normed_input"):
            flag(name, getattr(self, name))
        whole("groups", self.groups, 1, 2**14, "a whole number in [1, 16384]")
        most = f"a whole number in [1, {self.groups}], the number of groups"
        whole("kept_groups", self.kept_groups, 1, self.groups, most)
        whole("group_best", self.group_best, 1, 2**14, "a whole number in [1, 16384]")
        real("scale", self.scale, "(0, 3.4e38]")
        real("jitter", self.jitter, "[0, 1]")
        direct = self.of_chosen or self.scores == "sparsemixer"
        settle(
            (
                direct and (self.corrected or self.groups > 1),
                f"a router with scores={self.scores!r} and of_chosen={self.of_chosen} chooses by "
                "its logits, so it can have neither a correction (corrected) nor groups",
            ),
        )

    def check(self, experts: int, per_token: int) -> None:
        """Raises ValueError if this router cannot choose `per_token` of `experts` experts."""
        size, rest = divmod(experts, self.groups)
        settle(
            (
                self.groups > 1 and (rest or size < self.group_best),
                f"{experts} experts cannot be cut into {self.groups} groups of at least "
                f"{self.group_best}; groups must divide num_experts",
            ),
            (
                self.groups > 1 and per_token > size * self.kept_groups,
                f"experts_per_token={per_token}, but the {self.kept_groups} groups that are kept "
                f"have {size * self.kept_groups} experts",
            ),
            (
                self.scores == "sparsemixer" and per_token != 2,
                f"experts_per_token={per_token}; a sparsemixer chooses 2",
            ),
        )


def route(
    router: Router,
    logits: Array,
    count: int,
    normalise: bool,
    correction: Array | None = None,
    expert_scale: Array | None = None,
) -> tuple[Array, Array]:
    """Chooses the experts of each token.

    Args:
      router: the rule.
      logits: [T, E], one for each expert.
      count: of the experts that are chosen for a token.
      normalise: divide the weights of a token by their sum.
      correction: [E], if `router.corrected`.
      expert_scale: [E], if `router.expert_scale`.

    Returns:
      The weights [T, count] float32, and the experts [T, count] int32.
    """
    logits = logits.astype(jnp.float32)
    if router.scores == "sparsemixer":
        weights, experts = _sparsemixer(logits, router.jitter)
    elif router.of_chosen:
        best, experts = jax.lax.top_k(logits, count)
        weights = _scores(router.scores, best)
    else:
        scores = _scores(router.scores, logits)
        wanted = scores if correction is None else scores + correction.astype(jnp.float32)
        if router.groups > 1:
            wanted = _in_best_groups(wanted, router)
        _, experts = jax.lax.top_k(wanted, count)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
    if normalise:
        weights = weights / (weights.sum(-1, keepdims=True) + _LEAST_SUM)
    weights = weights * router.scale
    if expert_scale is not None:
        weights = weights * jnp.take(jnp.asarray(expert_scale, jnp.float32), experts)
    return weights, experts


def _scores(kind: str, logits: Array) -> Array:
    if kind == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    return jax.nn.sigmoid(logits) if kind == "sigmoid" else jnp.sqrt(jax.nn.softplus(logits))


def _in_best_groups(wanted: Array, router: Router) -> Array:
    """Returns the scores [T, E], with -inf for experts outside of the best groups of a token."""
    parts = wanted.reshape(len(wanted), router.groups, -1)
    of_group = jax.lax.top_k(parts, router.group_best)[0].sum(-1)
    _, best = jax.lax.top_k(of_group, router.kept_groups)
    inside = jax.nn.one_hot(best, router.groups, dtype=bool).any(1)
    return jnp.where(inside[..., None], parts, -jnp.inf).reshape(wanted.shape)


def _sparsemixer(logits: Array, jitter: float) -> tuple[Array, Array]:
    """Chooses two experts one after the other, each with a softmax of its own."""
    left, weights, experts = logits, [], []
    for _ in range(2):
        most, best = left.max(-1, keepdims=True), left.argmax(-1)[:, None]
        far = (most - logits) / jnp.maximum(jnp.abs(logits), most) > 2 * jitter
        near = jnp.where(far, -jnp.inf, left)
        weights.append(jnp.take_along_axis(jax.nn.softmax(near, axis=-1), best, axis=-1))
        experts.append(best)
        left = jnp.where(jnp.arange(logits.shape[-1]) == best, -jnp.inf, left)
    return jnp.concatenate(weights, -1), jnp.concatenate(experts, -1)
