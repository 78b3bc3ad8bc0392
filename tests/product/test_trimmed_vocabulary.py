"""Draft models with a part of their vocabulary: the text stays, and drafts come from the part."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import trim_vocabulary

pytestmark = pytest.mark.xdist_group("trimmed vocabulary")  # a share takes all of them, or none

PROMPTS = [[5, 9, 7, 12], [30, 2], [41, 8, 8, 8, 8, 8]]


@functools.cache
def pair(dtype: str = "float32") -> tuple[specjax.LanguageModel, specjax.LanguageModel]:
    target, draft = (specjax.load(specjax.shipped(f"tiny/{n}"), dtype) for n in ("target", "draft"))
    return target, draft


def logits(draft: specjax.LanguageModel) -> np.ndarray:
    tokens = jnp.asarray([[5, 300, 7, 12]])
    out = draft.model.apply(draft.params, tokens, jnp.arange(4)[None])
    return np.asarray(out.logits, np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rounded", [False, True])
def test_logits_of_the_part_are_those_of_the_whole(dtype: str, rounded: bool) -> None:
    draft = pair(dtype)[1]
    draft = specjax.quantise(draft) if rounded else draft
    ids = np.random.default_rng(0).permutation(512)[:120].tolist()
    small = trim_vocabulary(draft, ids)
    kept = np.flatnonzero(np.isfinite(logits(small)[0, 0]))
    assert len(kept) == 128 and set(ids) <= set(kept.tolist())
    assert set(draft.eos) <= set(kept.tolist())
    whole, part = logits(draft), logits(small)
    np.testing.assert_allclose(part[..., kept], whole[..., kept], rtol=0, atol=1e-5)
    assert np.isneginf(np.delete(part, kept, axis=-1)).all()


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("shape", ["Chain", "StaticTree"])
def test_texts_are_those_of_plain_decoding(rule: str, shape: str) -> None:
    """With match the same text for the same key; greedy texts are equal under every rule."""
    target, draft = pair()
    numbers: dict[str, Any] = {"num_drafts": 3} if shape == "Chain" else {"branching": (2, 2)}
    small = trim_vocabulary(draft, 256)
    drafter = specjax.make_drafter(target, small, getattr(specjax, shape), **numbers)
    temperature = 1.0 if rule == "match" else 0.0
    hows: list[dict[str, Any]] = [{"drafter": drafter, "rule": rule}, {"proposer": "none"}]
    made = [
        specjax.generate(
            target, PROMPTS, max_new_tokens=24, temperature=temperature, seed=4, eos=[], **how
        )
        for how in hows
    ]
    assert [np.asarray(x).tolist() for x in made[0].tokens] == [
        np.asarray(x).tolist() for x in made[1].tokens
    ]
    assert made[0].stats.accepted > 0


def test_a_draft_of_another_tokenizer() -> None:
    target, draft = pair()[0], specjax.load(specjax.shipped("pycode/draft"))
    small = trim_vocabulary(draft, 500)
    with pytest.warns(UserWarning, match="other tokens"):
        drafter = specjax.make_drafter(target, small, num_drafts=3)
    how: dict[str, Any] = {"max_new_tokens": 16, "temperature": 0.0, "eos": []}
    made = specjax.generate(target, ["import os\n"], drafter=drafter, **how)
    assert made.tokens == specjax.generate(target, ["import os\n"], proposer="none", **how).tokens
    assert made.stats.tested > 0


def test_a_number_keeps_the_frequent_tokens() -> None:
    draft = pair()[1]
    texts = [[300, 301, 302, 300], [300, 17]]
    kept = np.flatnonzero(np.asarray(trim_vocabulary(draft, 3, texts).params["columns"]) >= 0)
    assert {300, 17, 301} <= set(kept.tolist()) and len(kept) == 128
    assert 302 not in kept  # as frequent as 17 and 301, but with a greater id
    first = np.flatnonzero(np.asarray(trim_vocabulary(draft, 250).params["columns"]) >= 0)
    assert set(range(250)) <= set(first.tolist()) and len(first) == 256


def test_another_list_compiles_nothing() -> None:
    draft = pair()[1]
    one, other = trim_vocabulary(draft, [1, 2, 3]), trim_vocabulary(draft, [100, 200, 300])
    assert one.model == other.model and one.model != draft.model


@pytest.mark.parametrize(
    ("tokens", "texts", "said"),
    [
        (0, None, "tokens=0"),
        (512, None, "tokens=512"),
        (500, None, "512 as a multiple of 128"),
        ([], None, "number or a list"),
        ([0.5], None, "number or a list"),
        ("all", None, "number or a list"),
        ([1, 512], None, "the id 512"),
        ([1, -1], None, "the id -1"),
        ([1], [[2]], "it is a list"),
        (4, "text", "one string"),
        (4, [[1], [600]], r"texts\[1\] has the token 600"),
    ],
)
def test_what_is_refused(tokens: Any, texts: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trim_vocabulary(pair()[1], tokens, texts)


def test_a_trimmed_draft_is_not_trimmed_or_saved(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="trimmed already"):
        trim_vocabulary(trim_vocabulary(pair()[1], 128), 100)
    with pytest.raises(ValueError, match="save the model that was trimmed"):
        specjax.save(trim_vocabulary(pair()[1], 128), tmp_path / "small")
    assert not (tmp_path / "small").exists()
    with pytest.raises(ValueError, match=r"what specjax\.load"):
        trim_vocabulary("draft", 100)  # type: ignore[arg-type]
