"""A target that drafts with chunks of its own cache: rounded caches, an engine, and its pages."""

import pytest

import specjax
from specjax.methods import BoundDrafter
from specjax.serve import Engine

PROMPTS = ["def main(argv):", "import numpy as np and then", "for i in range(10): x = x + 1", "a"]


def near(target):
    """Few tokens, so that it chooses also in short texts."""
    return specjax.NearSelf(target.model, 8, sinks=2, num_drafts=3, selected=2, chunk=4)


@pytest.mark.parametrize("cache_dtype", [None, "int8", "float8"])
def test_the_text_is_that_of_plain_decoding(cache_dtype):
    target = specjax.load(specjax.shipped("tiny/target"), cache_dtype=cache_dtype)
    options = {"max_new_tokens": 48, "seed": 3, "temperature": [0.0, 0.8, 1.0, 0.0]}
    plain = specjax.generate(target, PROMPTS, proposer="none", **options)
    made = specjax.generate(target, PROMPTS, proposer=near(target), **options)
    assert made.tokens == plain.tokens
    assert 0.5 < made.stats.acceptance_rate < 1


@pytest.mark.parametrize("pages", [{}, {"cache_tokens": 1024}])
def test_an_engine_gives_the_text_of_plain_decoding(pages):
    """Also where rows come and go, and where prompts begin alike and share pages."""
    target = specjax.load(specjax.shipped("tiny/target"))
    texts = [*PROMPTS, PROMPTS[2] + "; y = 2", PROMPTS[2]]
    with Engine(target, {"near": BoundDrafter(near(target))}, slots=2, capacity=256, **pages) as it:
        asked = [
            it.submit(specjax.Request(prompts=text, max_new_tokens=48, proposer="near", seed=3))
            for text in texts
        ]
        served = [one.result() for one in asked]
    for text, one in zip(texts, served, strict=True):
        plain = specjax.generate(target, text, max_new_tokens=48, proposer="none", seed=3)
        assert [one.tokens] == plain.tokens
        assert one.stats.accepted > 0
