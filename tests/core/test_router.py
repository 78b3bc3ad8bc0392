"""The rules by which experts are chosen and weighted, beside NumPy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import Router, TransformerConfig, route

TOKENS, EXPERTS, COUNT = 50, 12, 4


def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, and a correction and a scale for each expert that change what is chosen."""
    rng = np.random.default_rng(0)
    logits, correction, scale = (rng.normal(size=s) for s in ((TOKENS, EXPERTS), EXPERTS, EXPERTS))
    return tuple(x.astype(np.float32) for x in (2 * logits, correction, 1 + 0.3 * scale))


def naive(router: Router, row: np.ndarray, normalise: bool, correction: Any, scale: Any):
    """The weight of each chosen expert of one token, one expert after the other, in float64."""
    softmax = {e: np.exp(x) / np.exp(row).sum() for e, x in enumerate(row.astype(np.float64))}
    if router.scores == "softmax":
        scores = softmax
    elif router.scores == "sigmoid":
        scores = {e: 1 / (1 + np.exp(-x)) for e, x in enumerate(row.astype(np.float64))}
    else:
        scores = {e: np.log1p(np.exp(x)) ** 0.5 for e, x in enumerate(row.astype(np.float64))}
    wanted = {e: s + (correction[e] if router.corrected else 0) for e, s in scores.items()}
    if router.groups > 1:
        size = EXPERTS // router.groups
        parts = [range(g * size, (g + 1) * size) for g in range(router.groups)]
        best = sorted(parts, key=lambda part: -sum(sorted(wanted[e] for e in part)[-2:]))
        wanted = {e: wanted[e] for part in best[: router.kept_groups] for e in part}
    taken = sorted(wanted, key=lambda e: -wanted[e])[:COUNT]
    weights = {e: scores[e] for e in taken}
    if router.of_chosen and router.scores == "softmax":
        weights = {e: softmax[e] / sum(softmax[t] for t in taken) for e in taken}
    total = sum(weights.values()) if normalise else 1
    return {e: w / total * router.scale * (scale[e] if router.expert_scale else 1)
            for e, w in weights.items()}  # fmt: skip


RULES = {
    "softmax": Router(),
    "softmax of the chosen": Router(of_chosen=True),
    "sigmoid": Router("sigmoid", scale=2.5),
    "sigmoid of the chosen": Router("sigmoid", of_chosen=True),
    "sqrtsoftplus": Router("sqrtsoftplus", scale=1.5),
    "corrected": Router("sigmoid", corrected=True),
    "corrected softmax": Router(corrected=True),
    "groups": Router("sigmoid", corrected=True, groups=4, kept_groups=2, scale=2.5),
    "groups of softmax": Router(groups=3, kept_groups=1),
    "expert scale": Router(expert_scale=True),
}


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_chooses_and_weights_as_naive_code_does(name: str, normalise: bool):
    router, (logits, correction, scale) = RULES[name], drawn()

    @jax.jit
    def routed(logits):
        given = correction if router.corrected else None
        return route(
            router, logits, COUNT, normalise, given, scale if router.expert_scale else None
        )

    weights, experts = map(np.asarray, routed(logits))
    for row, mine, of in zip(logits, weights, experts, strict=True):
        wanted = naive(router, row, normalise, correction, scale)
        found = dict(zip(of.tolist(), mine.tolist(), strict=True))
        assert found.keys() == wanted.keys()
        np.testing.assert_allclose([found[e] for e in wanted], list(wanted.values()), rtol=2e-6)


def test_a_correction_chooses_and_does_not_weight():
    logits = jnp.asarray([[0.0, 1.0, 2.0]])
    correction = jnp.asarray([5.0, 0.0, 0.0])
    rule = functools.partial(route, Router("sigmoid", corrected=True), count=1, normalise=False)
    weights, experts = rule(logits, correction=correction)
    assert experts.tolist() == [[0]] and weights.tolist() == [[0.5]]


def test_a_sparsemixer_has_a_softmax_for_each_of_two_experts():
    """Logits that are further from the greatest one than twice the jitter have no part in it."""
    logits = jnp.asarray([[1.0, 0.99, 0.5, 0.495], [-1.0, -1.5, -4.0, -4.0]])
    weights, experts = route(Router("sparsemixer", jitter=0.01), logits, 2, False)
    assert experts.tolist() == [[0, 1], [0, 1]]
    near = 1 / (1 + np.exp(-0.01))  # 0.99 is near 1, and 0.5 is near neither
    np.testing.assert_allclose(weights, [[near, 1.0], [1.0, 1.0]], rtol=1e-6)


def test_scores_are_float32_whatever_the_logits_are():
    logits = drawn()[0].astype(jnp.bfloat16)
    weights, _ = route(Router("sigmoid", scale=2.5), jnp.asarray(logits), COUNT, True)
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights.sum(-1), 2.5, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scores": "tanh"}, "scores='tanh' is not allowed; pass one of softmax, sigmoid"),
        ({"groups": 0}, "groups=0 is not allowed; it must be a whole number in"),
        ({"groups": 2, "kept_groups": 3}, "kept_groups=3 is not allowed; .* the number of groups"),
        ({"scale": 0.0}, r"scale=0.0; it must lie in \(0"),
        ({"jitter": -1.0}, r"jitter=-1.0; it must lie in \[0, 1\]"),
        ({"bias": 1}, "bias=1 is not allowed; it must be True or False"),
        ({"of_chosen": True, "corrected": True}, "chooses by its logits, so it can have neither"),
        ({"scores": "sparsemixer", "groups": 2}, "chooses by its logits, so it can have neither"),
    ],
)  # fmt: skip
def test_a_router_checks_itself(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Router(**fields)


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (Router(groups=5), "12 experts cannot be cut into 5 groups of at least 2"),
        (Router(groups=12), "12 experts cannot be cut into 12 groups of at least 2"),
        (Router(groups=6, kept_groups=1), "experts_per_token=4, but the 1 groups that are kept"),
        (Router("sparsemixer"), "experts_per_token=4; a sparsemixer chooses 2"),
        ("softmax", "router='softmax'"),
    ],
)
def test_a_configuration_checks_its_router(router: Any, message: str):
    sizes = {
        "vocab_size": 9, "hidden_size": 8, "mlp_size": 8, "num_layers": 1, "num_heads": 2,
        "num_kv_heads": 1, "head_dim": 4, "max_positions": 16, "expert_size": 8,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**sizes, num_experts=12, experts_per_token=4, router=router)
