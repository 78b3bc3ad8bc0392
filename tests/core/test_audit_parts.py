"""The parts of the auditor: its NumPy warp and processors, exact cells, and rounding."""

import collections
import functools

import audit_campaign
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from toys import TABLES as toys

from specjax import Sampling, make_key, sampling
from specjax.auditing.distribution import Cells, cells_of, judge
from specjax.auditing.reference import Reader, Rounding, noise, precision
from specjax.auditing.samples import GREEDY, batch, kinds_beside
from specjax.auditing.warping import Processing, Settings, softmax, warp

VOCAB, EOS = 29, (22,)

sampled = jax.jit(sampling.warp)


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    st.integers(0, 12),
    st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_the_warp_is_that_of_the_sampler(seed, temperature, top_k, top_p, min_p):
    """Where the NumPy warp is certain, the sampler keeps the same tokens with the same weights."""
    logits = np.random.default_rng(seed).normal(0, 2, (8, VOCAB)).astype(np.float32)
    settings = Settings(temperature, top_k, top_p, min_p)
    found, sure = warp(logits, settings, 1e-5)
    wanted = sampled(logits[:, None], Sampling.create(8, temperature, top_k, top_p, min_p))[:, 0]
    assert sure.mean() > 0.5
    np.testing.assert_allclose(
        softmax(found)[sure], softmax(np.asarray(wanted, float))[sure], atol=1e-6
    )


@pytest.mark.parametrize(
    ("settings", "moved"),
    [
        (Settings(1.0, top_k=2), [3.0, 2.0, 2.0 - 1e-6, 0.0]),
        (Settings(1.0, min_p=0.5), [0.0, np.log(0.5) + 1e-6, -3.0, -4.0]),
        (Settings(1.0, top_p=0.5), [0.0, 1e-7, -40.0, -40.0]),
        (Settings(0.0), [1.0, 1.0 + 1e-6, 0.0, 0.0]),
    ],
)
def test_a_logit_at_a_bound_is_not_certain(settings, moved):
    assert not warp(np.array([moved]), settings, 1e-5)[1][0]
    assert warp(np.array([[3.0, 2.0, 0.0, -1.0]]), settings, 1e-5)[1][0]


def test_processors_are_those_of_the_reference_of_the_tests():
    """A second NumPy reference, which is compared with transformers elsewhere, agrees."""
    settings = {
        "repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2,
        "logit_bias": {3: 1.5, 7: -np.inf}, "bad_words": [[5], [1, 2], [4, 4, 6]],
        "min_new_tokens": 3,
    }  # fmt: skip
    random = np.random.default_rng(0)
    texts = [random.integers(0, 6, size).tolist() for size in (4, 5, 6, 9, 9)] + [[1, 4, 4], [0, 1]]
    logits = random.normal(0, 2, (len(texts), VOCAB))
    for function, again in ((None, None), (reference.no_repeated_pair,) * 2):
        own = Processing(settings, EOS, function, 16)
        found = own(logits, texts, [2] * len(texts))
        wanted = [
            reference.reference(
                row, text, 2, EOS, settings, again and reference.no_repeated_pair_reference
            )
            for row, text in zip(logits, texts, strict=True)
        ]
        np.testing.assert_allclose(found, np.stack(wanted), rtol=1e-5, atol=1e-5)


def reader(rows=8):
    return Reader(toys.model(), toys.weights(), rows)


def test_whole_texts_are_read_without_a_cache():
    """The logits after the last tokens are those of one pass over each text."""
    texts = [
        text[:end].tolist() for text, end in zip(toys.greedy_texts(), range(3, 19), strict=True)
    ]
    seen = np.zeros(len(texts), int)
    for numbers, logits, _ in reader().after(texts, 20, 2):
        for number, found in zip(numbers, logits, strict=True):
            wanted = toys.plain_logits(np.array([texts[number]]))[0, -2:]
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
            seen[number] += 1
    assert (seen == 1).all()


def test_cells_share_all_texts():
    """The shares of the cells sum to 1, and samples of the exact distribution find their cells."""
    prompts, settings = [[5, 6, 7], [4]], (Settings(0.0), Settings(2.5, top_k=4))
    sizes = {(1, 0): 3000, (1, 1): 200}
    processing = Processing({}, EOS, None, 16)
    cells = cells_of(reader(), prompts, settings, processing, sizes, 3, 1e-6)

    @functools.cache
    def following(prompt, text):
        logits = toys.plain_logits(np.array([[*prompts[prompt], *text]]))[:, -1]
        return softmax(warp(logits, settings[1], 0.0)[0])[0]

    random, drawn = np.random.default_rng(0), {group: collections.Counter() for group in sizes}
    for (_, prompt), counter in drawn.items():
        for _ in range(sizes[1, prompt]):
            text = []
            while len(text) < 3 and (not text or text[-1] not in EOS):
                text.append(int(random.choice(VOCAB, p=following(prompt, tuple(text)))))
            counter[tuple(text)] += 1
    for group, one in cells.items():
        assert sum(one.wanted) == pytest.approx(1)
        assert min(one.wanted) * sizes[group] >= 7.99 or len(one.wanted) == 1
        assert None not in {one.find(text) for text in drawn[group]}
    assert len(cells[1, 0].wanted) > len(cells[1, 1].wanted) > 1
    check = judge("distribution", True, cells, drawn, 1e-3, 0.0)
    assert check.holds, check.detail
    wrong = {group: collections.Counter({(20, 20, 20): sizes[group]}) for group in sizes}
    check = judge("distribution", True, cells, wrong, 1e-3, 0.0)
    assert check.p_value == 0
    assert "the settings exclude" in check.detail


def test_a_rare_rest_joins_the_rarest_cell():
    cells = Cells()
    assert cells.split((), np.array([0.5, 0.3, 0.199, 0.001]), 1.0, 100) == [(1,), (0,)]
    assert cells.wanted == pytest.approx([0.2])
    cells.own[1,], cells.own[0,] = cells.add(0.3), cells.add(0.5)
    assert [cells.find((token,)) for token in range(4)] == [2, 1, 0, 0]


def test_rounding_is_capped_by_the_format():
    """What a number format cannot explain is not rounding."""
    logits = np.random.default_rng(0).normal(0, 2, (4, VOCAB))
    eps = float(np.finfo(np.float32).eps)
    close = Rounding.measure(logits, [logits + 3e-6], eps)
    far = Rounding.measure(logits, [logits + 0.5], eps)
    assert 3e-6 < close.slack < 1e-4
    assert far.slack < 1e-4
    coarse = Rounding.measure(logits, [logits + 0.02], 2.0**-7)
    assert 0.02 < coarse.slack < 0.3
    assert coarse.typical == pytest.approx(0.02)
    assert precision(jnp.zeros(2, jnp.bfloat16), jnp.zeros(2, jnp.float32)) == 2.0**-7
    assert precision(jnp.zeros(2, jnp.int8), jnp.zeros(2, jnp.float32)) == eps


def test_rounding_raises_no_alarm_and_costs_power():
    """With coarse numbers the least bias that is found is larger, and p-values are larger."""
    cells = {(1, 0): Cells(wanted=[0.25] * 4, own={(n,): n for n in range(4)} | {(): None})}
    cells[1, 0].excluded[()] = np.zeros(4, bool)
    drawn = {(1, 0): collections.Counter({(0,): 280, (1,): 240, (2,): 240, (3,): 240})}
    fine, coarse = (judge("d", True, cells, drawn, 1e-3, rounding) for rounding in (0.0, 0.01))
    assert fine.p_value < coarse.p_value
    assert fine.detectable < coarse.detectable
    assert fine.total_variation == coarse.total_variation == pytest.approx(0.03)


def test_noise_is_that_of_the_law():
    """g_t is drawn with the row's key and the position t folded into it."""
    keys = toys.keys(3)
    at = np.array([5, 1, 9])
    found = noise(keys, at, VOCAB)
    draw = sampling.SharedDraw.create(keys, jnp.asarray(at) - 1, 0, VOCAB, jnp.bool_(True))
    np.testing.assert_array_equal(found, draw.gumbel[:, 0])
    assert noise(keys[jnp.zeros(2100, int)], np.arange(2100), 5).shape == (2100, 5)


def test_batches_mix_rows():
    """Every kind meets every prompt, rows end at different times, and batches differ."""
    settings = kinds_beside(Settings(0.8, top_p=0.9), VOCAB)
    assert [str(kind) for kind in settings] == [
        "temperature 0",
        "temperature 0.8, top-p 0.9",
        "temperature 1.28, top-p 0.85",
        "temperature 0.56, top-k 14, top-p 0.9",
    ]
    rows = batch([(1, 2), (3,)], settings, 64, 8, 0, 1, 2)
    assert {(int(p), int(k)) for p, k in zip(rows.prompt_of, rows.kind, strict=True)} == {
        (p, k) for p in range(2) for k in range(4)
    }
    new = rows.limit - rows.lengths
    assert set(new[rows.kind != GREEDY]) == {6, 7, 8}
    assert len(set(new[rows.kind == GREEDY])) > 3
    assert 1 <= new.min() <= new.max() <= 8
    other = batch([(1, 2), (3,)], settings, 64, 8, 0, 2, 2)
    assert (rows.kind != other.kind).any()
    assert (rows.key != other.key).all()
    order = np.random.default_rng(0).permutation(64)
    mixed = rows.shuffled(order)
    assert (mixed.lengths == rows.lengths[order]).all()
    assert (mixed.sampling.temperature == rows.sampling.temperature[order]).all()
    assert (rows.key == batch([(1,)], settings, 64, 4, 0, 1, 0).key).all()
    assert make_key(0).dtype == rows.key.dtype


def test_the_campaign_is_of_all_faults():
    """The bugs of the field that the auditor is made for, with those that cost speed only."""
    assert len(audit_campaign.FAULTS) == 37
    assert set(audit_campaign.SPEED) < set(audit_campaign.FAULTS)
    assert len(audit_campaign.CLEAN) == 12
