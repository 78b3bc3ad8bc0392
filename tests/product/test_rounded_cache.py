"""Caches in 8 bits: what they store, and texts that depend on the prompt and the seed alone."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from toys import TRANSFORMERS as toys

import specjax
from specjax import Request
from specjax.caches import CACHE_DTYPES, KVCache, as_read, stored
from specjax.models import LanguageModel
from specjax.serve import Engine

pytestmark = pytest.mark.xdist_group("rounded cache")  # a share takes all of them, or none


@functools.cache
def target(name: str | None) -> LanguageModel:
    model = dataclasses.replace(toys.model(), cache_dtype=name)
    return LanguageModel(model, toys.weights(), None, (), f"toy in {name}")


def test_each_token_is_rounded_by_itself():
    x = np.random.default_rng(0).normal(size=(3, 2, 5, 8)).astype(np.float32) * 30
    x[0, 0, 0] = 0
    x[1, 1, 1, 0] = 4e4
    for name, dtype in CACHE_DTYPES.items():
        codes = stored(jnp.asarray(x), dtype)
        read = np.asarray(as_read(codes, jnp.float32))
        most = np.abs(x).max(-1, keepdims=True)
        bound = most / 254 * 1.001 if name == "int8" else np.abs(x) / 16 + 2**-10
        inside = np.abs(x) <= 448
        assert (np.abs(read - x) <= bound)[inside | (name == "int8")].all()
        assert not read[0, 0, 0].any() and np.isfinite(read).all()
        once, again = (np.asarray(y).view(np.uint8) for y in (codes, stored(codes, dtype)))
        assert (again == once).all()
        one = np.asarray(stored(jnp.asarray(x[1:2, :, 3:4]), dtype)).view(np.uint8)
        assert (one == once[1:2, :, 3:4]).all()


@pytest.mark.parametrize("name", CACHE_DTYPES)
def test_texts_are_those_of_generate(name: str):
    """With pages and without, with drafts and without; and they are not those of a plain cache."""
    model = target(name)
    cache, whole = model.model.init_cache(2, 16), target(None).model.init_cache(2, 16)
    assert isinstance(cache, KVCache) and isinstance(whole, KVCache)
    assert {x.dtype for x in cache.keys} == {CACHE_DTYPES[name]}
    assert cache.keys[0].nbytes <= whole.keys[0].nbytes * 3 / 8
    heads = specjax.Drafter(*toys.CASES["eagle3 tree"], "head")
    asks = [
        Request(
            prompts=[[(first + n) % 20 for n in range(length)]], max_new_tokens=32, seed=first,
            proposer=("none", "head")[first % 2], temperature=1, eos=[],
        )
        for first, length in enumerate((12, 9, 20, 12, 5, 7))
    ]  # fmt: skip
    settings: dict[str, Any] = {"slots": 3, "capacity": 64, "chunk": 16, "page": 16}
    texts = []
    for cache_tokens in (None, 16 * 7):
        with Engine(model, {"head": heads}, **settings, cache_tokens=cache_tokens) as engine:
            handles = [engine.submit(one) for one in asks]
            texts.append([handle.result(60).tokens for handle in handles])
            assert cache_tokens is None or engine.load().set_back > 0
    settings = {"proposer": "none", "max_new_tokens": 32, "temperature": 1, "eos": []}
    for number, one in enumerate(asks):
        settings |= {"prompts": one.prompts, "seed": one.seed, "logprobs": 0}
        out, plain = (specjax.generate(wanted, **settings) for wanted in (model, target(None)))
        assert out.tokens[0] == texts[0][number] == texts[1][number]
        assert out.logprobs and plain.logprobs
        assert not np.allclose(out.logprobs[0].raw[:3], plain.logprobs[0].raw[:3], atol=1e-5)


def test_refused():
    with pytest.raises(ValueError, match=r"cache_dtype='int4' is not allowed; .* int8, float8"):
        specjax.load(specjax.shipped("tiny/target"), cache_dtype="int4")
