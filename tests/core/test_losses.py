"""Losses against float64, finite differences and unchunked losses."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import Int8
from specjax.sampling import Sampling, warp
from specjax.training import accepted
from specjax.training.divergences import DIVERGENCES, acceptance, blend
from specjax.training.losses import (
    Teacher,
    against,
    agreement,
    chunked,
    chunked_rows,
    chunked_with_rows,
    cross_entropy,
    log_draft,
    log_target,
    with_cap,
)
from specjax.training.objectives import OBJECTIVES, per_row
from specjax.training.precision import mixed_dot_general

KEYS = jax.random.split(jax.random.key(0), 5)
HIDDEN, HEAD = jax.random.normal(KEYS[0], (37, 8)), jax.random.normal(KEYS[1], (8, 11))
TARGET_HIDDEN, TARGET_HEAD = (
    jax.random.normal(KEYS[2], (37, 6)),
    jax.random.normal(KEYS[3], (6, 11)),
)
TEACHER = Teacher(TARGET_HEAD)
LABELS = jax.random.randint(KEYS[4], (37,), 0, 11)
WEIGHT = (jnp.arange(37) % 3 > 0).astype(jnp.float32)
LAST_FIRST = (((1,), (0,)), ((), ()))
LOGITS, TARGET_LOGITS = (
    mixed_dot_general(HIDDEN, HEAD, LAST_FIRST),
    mixed_dot_general(TARGET_HIDDEN, TARGET_HEAD, LAST_FIRST),
)
WARM = Sampling.create(1, 0.7, top_k=6, top_p=0.9)
LOSSES = {
    "cross-entropy": (cross_entropy, (WEIGHT, LABELS), ()),
    **{name: (against(d), (WEIGHT, TARGET_HIDDEN), (TEACHER,)) for name, d in DIVERGENCES.items()},
    "warped": (
        against(DIVERGENCES["jensen-shannon"]),
        (WEIGHT, TARGET_HIDDEN),
        (TEACHER, WARM, jnp.float32(0.3)),
    ),
}
FILTERED = [name for name in DIVERGENCES if name != "reverse-kl"]


def close(actual, wanted, tolerance):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@functools.cache
def compared():
    """(cut into chunks, whole) of each loss and size of chunks, with gradients, in one program."""

    def whole(name, chunk, hidden, head):
        loss, rows, shared = LOSSES[name]
        return loss(mixed_dot_general(hidden, head, LAST_FIRST), *rows, *shared)

    def cut(name, chunk, hidden, head):
        loss, rows, shared = LOSSES[name]
        return chunked(loss, chunk)(hidden, head, rows, shared)

    def every(hidden, head):
        return {
            case: [
                jax.value_and_grad(functools.partial(f, *case), (0, 1))(hidden, head)
                for f in (cut, whole)
            ]
            for case in CHUNKED
        }

    return jax.jit(every)(HIDDEN, HEAD)


CHUNKED = [*((name, 8) for name in LOSSES), ("forward-kl", 64)]


@pytest.mark.parametrize(("name", "chunk"), CHUNKED)
def test_a_chunked_loss_is_the_whole_one(name, chunk):
    """Value and gradients agree, whether or not the chunks divide the rows."""
    close(*compared()[name, chunk], 2e-4)


@pytest.mark.parametrize("trains_head", [True, False])
def test_chunks_with_numbers_of_rows(trains_head):
    """The sum and its gradients are those of `chunked`; a frozen head has none; the numbers of the
    rows are in their order, and have no gradient."""

    def loss(logits, weight, labels):
        return cross_entropy(logits, weight, labels), {"best": logits.max(1)}

    both = chunked_with_rows(loss, 8, trains_head)

    def total(hidden, head):
        value, rows = both(hidden, head, (WEIGHT, LABELS))
        return value + 3 * rows["best"].sum(), rows

    (value, rows), grads = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(HIDDEN, HEAD)
    plain, wanted = jax.jit(
        jax.value_and_grad(lambda *x: chunked(cross_entropy, 8)(*x, (WEIGHT, LABELS)), (0, 1))
    )(HIDDEN, HEAD)
    close(value - 3 * rows["best"].sum(), plain, 1e-4)
    close(rows["best"], LOGITS.max(1), 1e-6)
    close(grads[0], wanted[0], 1e-6)
    close(grads[1], wanted[1] if trains_head else 0 * wanted[1], 1e-6)


@jax.jit
def objectives(*arguments):
    """All of them in one program."""
    return {name: per_row(made, None, None)(*arguments) for name, made in OBJECTIVES.items()}


@pytest.mark.parametrize("known", [None, [1, 4, 5, 9]])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_against_float64(name, known):
    """Each is its formula, also for a draft that knows a part of the tokens."""
    target = np.asarray(TARGET_LOGITS, np.float64)
    p = np.exp(target) / np.exp(target).sum(1, keepdims=True)
    columns = np.arange(11) if known is None else np.array(known)
    p, logits = p[:, columns], np.asarray(LOGITS, np.float64)[:, columns]
    q = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    place = {token: at for at, token in enumerate(columns.tolist())}
    labels = np.array([place.get(token, -1) for token in np.asarray(LABELS).tolist()])
    alpha = np.minimum(p, q).sum(1)
    hard = np.where(labels < 0, 0, -np.log(q[np.arange(len(q)), labels]))
    kl, reverse, m = (p * np.log(p / q)).sum(1), (q * np.log(q / p)).sum(1), (p + q) / 2
    w = np.exp(-3 * alpha)
    wanted = {
        "cross-entropy": hard,
        "forward-kl": kl,
        "reverse-kl": reverse,
        "jensen-shannon": ((p * np.log(p / m)).sum(1) + (q * np.log(q / m)).sum(1)) / 2,
        "total-variation": 1 - alpha,
        "log-acceptance": -np.log(alpha),
        "adaptive": w * kl + (1 - w) * (1 - alpha),
        "cross-entropy-l1": 0.1 * hard + 0.9 * 2 * (1 - alpha),
    }[name]
    known = None if known is None else np.array(known)
    value, rows = objectives(
        np.asarray(LOGITS)[:, columns], WEIGHT, labels, TARGET_HIDDEN, TARGET_HEAD, known
    )[name]
    close(value, (np.asarray(WEIGHT) * wanted).sum(), 1e-4)
    close(rows, alpha, 1e-5)


@pytest.mark.parametrize("sampling", [None, WARM], ids=["plain", "warped"])
def test_chunked_rows_are_the_whole_ones(sampling):
    """The statistics of each token agree, and so does the gradient of any function of them."""
    rows, shared, mix = (
        (LABELS, TARGET_HIDDEN),
        (TEACHER, sampling),
        jax.random.normal(KEYS[0], (37, 3)),
    )

    def whole(hidden, head):
        statistics = accepted.statistics(
            mixed_dot_general(hidden, head, LAST_FIRST), *rows, *shared
        )
        return jnp.sum(mix * statistics), statistics

    def cut(hidden, head):
        statistics = chunked_rows(accepted.statistics, 8)(hidden, head, rows, shared)
        return jnp.sum(mix * statistics), statistics

    actual, wanted = (
        jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(HIDDEN, HEAD) for f in (cut, whole)
    )
    close(actual, wanted, 2e-4)


@pytest.mark.parametrize("kind", ["sum", "rows"])
def test_chunks_keep_no_logits(kind):
    """With an eighth of the tokens per chunk, loss and gradient need less than a quarter of the
    memory."""
    tokens, vocab = 1024, 4096
    shapes = [(tokens, 8), (8, vocab), (tokens, 8), (8, vocab)]

    def total(chunk, hidden, head, target_hidden, target_head):
        if kind == "sum":
            rows = (jnp.ones(tokens), target_hidden)
            return chunked(against(DIVERGENCES["total-variation"]), chunk)(
                hidden, head, rows, (Teacher(target_head),)
            )
        rows = (jnp.zeros(tokens, jnp.int32), target_hidden)
        return chunked_rows(accepted.statistics, chunk)(
            hidden, head, rows, (Teacher(target_head),)
        ).sum()

    def memory(chunk):
        function = jax.jit(jax.grad(functools.partial(total, chunk), (0, 1)))
        arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        analysis = function.lower(*arguments).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    cut, whole = memory(tokens // 8), memory(tokens)
    assert whole > 4 * tokens * vocab, "the comparison holds a whole tensor of logits"
    assert cut < whole / 4


def float64(logits):
    logits = np.asarray(logits, np.float64)
    return np.exp(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def written_out(name, p, q, weight=None):
    """A divergence in NumPy, from probabilities; `weight` is that of KL in `adaptive`, which has no
    gradient."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if name == "forward-kl":
            return np.nansum(p * np.log(p / q), axis=-1)
        if name == "reverse-kl":
            return np.nansum(q * np.log(q / p), axis=-1)
        if name == "jensen-shannon":
            m = (p + q) / 2
            return (
                np.nansum(p * np.log(p / m), axis=-1) + np.nansum(q * np.log(q / m), axis=-1)
            ) / 2
    alpha = np.minimum(p, q).sum(-1)
    if name == "log-acceptance":
        return -np.log(alpha)
    if name == "adaptive":
        weight = np.exp(-3 * alpha) if weight is None else weight
        return weight * written_out("forward-kl", p, q) + (1 - weight) * (1 - alpha)
    return 1 - alpha


@functools.cache
def divergences(warped):
    """The target, and the value and the gradient of each divergence from it, in one program."""
    sampling = WARM if warped else None

    @jax.jit
    def every(logits):
        target = log_target(TARGET_LOGITS, sampling)

        def divergence(name, logits):
            return DIVERGENCES[name](target, log_draft(logits, sampling))

        values, gradients = {}, {}
        for name in FILTERED if warped else DIVERGENCES:
            of_name = functools.partial(divergence, name)
            values[name] = of_name(logits)
            gradients[name] = jax.grad(lambda x, of_name=of_name: of_name(x).sum())(logits)
        return target, values, gradients

    return every(LOGITS)


@pytest.mark.parametrize(
    ("name", "sampling"), [*((n, None) for n in DIVERGENCES), *((n, WARM) for n in FILTERED)]
)
def test_divergences_against_float64(name, sampling):
    """Values and gradients (by finite differences) agree, with and without filters on the
    target."""
    target, values, gradients = divergences(sampling is not None)
    p = float64(np.asarray(target, np.float64))
    heat = 1.0 if sampling is None else float(sampling.temperature[0])
    logits = np.asarray(LOGITS, np.float64)

    weight = np.exp(-3 * np.minimum(p, float64(logits / heat)).sum(-1))

    def value(logits):
        return written_out(name, p, float64(logits / heat), weight)

    assert sampling is None or (p == 0).any()
    np.testing.assert_allclose(values[name], value(logits), rtol=2e-4, atol=2e-6)
    grads = np.asarray(gradients[name])
    for v in range(logits.shape[1]):
        step = np.zeros_like(logits)
        step[:, v] = 1e-5
        np.testing.assert_allclose(
            grads[:, v], (value(logits + step) - value(logits - step)) / 2e-5, rtol=2e-3, atol=2e-5
        )


def test_statistics_against_float64():
    """Cross-entropy and the statistics that are reported beside a loss agree."""
    p, q = float64(TARGET_LOGITS), float64(LOGITS)
    wanted = -(np.asarray(WEIGHT) * np.log(q[np.arange(37), LABELS])).sum()
    assert float(cross_entropy(LOGITS, WEIGHT, LABELS)) == pytest.approx(wanted, rel=1e-5)
    alpha, same = np.minimum(p, q).sum(1), p.argmax(1) == q.argmax(1)
    kl = written_out("forward-kl", p, q)
    np.testing.assert_allclose(
        agreement(LOGITS, TARGET_HIDDEN, TEACHER), np.stack([kl, alpha, same], 1), rtol=1e-4
    )
    ratio = np.minimum(1, (q / p)[np.arange(37), LABELS])
    statistics = accepted.statistics(LOGITS, LABELS, TARGET_HIDDEN, TEACHER)
    np.testing.assert_allclose(statistics, np.stack([kl, ratio, alpha], 1), rtol=1e-4)


def test_a_blend_goes_from_forward_kl_to_the_loss():
    """Both ends and the middle are as defined."""
    target, draft = log_target(TARGET_LOGITS), log_draft(LOGITS)
    kl, tv = (DIVERGENCES[name](target, draft) for name in ("forward-kl", "total-variation"))
    for share in (0.0, 0.25, 1.0):
        blended = blend(DIVERGENCES["total-variation"], jnp.float32(share))(target, draft)
        np.testing.assert_allclose(blended, (1 - share) * kl + share * tv, rtol=1e-5)


def test_a_greedy_target_is_one_token_and_its_draft_is_not():
    """At temperature 0, alpha is the draft's probability of the target's token, and it can be
    learned."""
    greedy = Sampling.create(1, 0.0)
    alpha = acceptance(log_target(TARGET_LOGITS, greedy), log_draft(LOGITS, greedy))
    wanted = float64(LOGITS)[np.arange(37), np.asarray(TARGET_LOGITS).argmax(1)]
    np.testing.assert_allclose(alpha, wanted, rtol=1e-4)


def test_warping_in_a_loss_is_the_decoders():
    """It is the same function as in decoding, so it gives the same distribution."""
    wanted = jax.nn.log_softmax(warp(TARGET_LOGITS[None], WARM)[0])
    np.testing.assert_array_equal(log_target(TARGET_LOGITS, WARM), wanted)


@pytest.mark.parametrize("axis", [0, 1])
def test_mixed_products_round_and_sum_as_they_say(axis):
    """The factors are bfloat16, the sums float32, and both factors have gradients."""
    x, kernel = HIDDEN[:5], HEAD if axis == 0 else HEAD.T
    dimensions = (((1,), (axis,)), ((), ()))

    def rounded(a):
        return np.asarray(a.astype(jnp.bfloat16), np.float64)

    wanted = rounded(x) @ (rounded(kernel) if axis == 0 else rounded(kernel).T)
    np.testing.assert_allclose(
        mixed_dot_general(x, kernel, dimensions), wanted, rtol=1e-6, atol=1e-6
    )
    gradients = jax.grad(lambda x, k: (mixed_dot_general(x, k, dimensions) ** 2).sum(), (0, 1))(
        x, kernel
    )
    plain = jax.grad(lambda x, k: (jax.lax.dot_general(x, k, dimensions) ** 2).sum(), (0, 1))(
        x, kernel
    )
    for a, b in zip(gradients, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=0.05, atol=0.2)


def test_a_softcap_is_applied_on_both_sides():
    """Capped logits of the target and of the draft give the loss of these logits."""
    capped = [3 * np.tanh(np.asarray(x) / 3) for x in (LOGITS, TARGET_LOGITS)]
    wanted = against(DIVERGENCES["forward-kl"])(
        jnp.asarray(capped[0]), WEIGHT, jnp.asarray(capped[1]), Teacher(jnp.eye(11))
    )
    loss = with_cap(against(DIVERGENCES["forward-kl"]), 3.0)
    actual = chunked(loss, 8)(HIDDEN, HEAD, (WEIGHT, TARGET_HIDDEN), (Teacher(TARGET_HEAD, 3.0),))
    close(actual, wanted, 2e-2)  # the reference rounds the target's logits to bfloat16
    loss, rows, shared = LOSSES["forward-kl"]
    assert abs(float(actual) - float(loss(LOGITS, *rows, *shared))) > 1, "without a cap it differs"


def test_an_int8_teacher():
    """Its logits are those of the product in int8, which differ from the rounded ones."""
    matrix = Int8.quantise(TARGET_HEAD)
    logits = Teacher(matrix).logits(TARGET_HIDDEN)
    scale = np.abs(TARGET_HIDDEN).max(1, keepdims=True) / 127
    rounded = np.round(np.asarray(TARGET_HIDDEN) / scale)
    weights = np.asarray(matrix.values, np.float64).T * np.asarray(matrix.scale)
    close(logits, rounded * scale @ weights, 1e-4)
    assert np.abs(logits - TARGET_LOGITS).max() > 1e-3
