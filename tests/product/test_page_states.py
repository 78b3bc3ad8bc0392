"""Engines with pages over targets that have more than keys and values by slot: latent vectors,
rings of sliding windows, recurrent states.  Texts are those of an engine without pages and of
`generate`, with drafts and without, alone and after a shared beginning, and while pages run out."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import hybrid_model
import latent_model
import pytest
import rings

import specjax
from specjax import Request
from specjax.caches import prefill
from specjax.methods import BoundDrafter
from specjax.models import LanguageModel
from specjax.serve import Engine, Served

PAGE, CHUNK = 16, 16


@functools.cache
def target(kind: str) -> LanguageModel:
    kind, _, rounded = kind.partition(" in ")
    if rounded:
        plain = target(kind)
        assert isinstance(plain.model, specjax.LinenModel)
        model = dataclasses.replace(plain.model, cache_dtype=rounded)
        return dataclasses.replace(plain, model=model)
    if kind == "latent":
        return LanguageModel(latent_model.model(), latent_model.weights(), None, (), kind)
    if kind == "rings":
        return LanguageModel(rings.TARGET, rings.WEIGHTS, None, (), kind)
    return LanguageModel(hybrid_model.MODEL, hybrid_model.weights(), None, (), kind)


def asks(kind: str) -> list[Request]:
    """Prompts of which some begin alike, and others leave them after two pages."""
    shared = [(3 * n) % 11 + 1 for n in range(33)]
    prompts = [[*shared, 4], [5, 6], [*shared[:18], 9, 9, 8], [*shared, 7, 2], [*shared, 5, 1]]
    prompts += [[*shared[:20], 3, 1], list(range(1, 10))]
    return [
        Request(
            prompts=[prompt], max_new_tokens=10, seed=n, temperature=n % 2, eos=[],
            proposer=("none", "lookup", "tree")[n % 3],
        )
        for n, prompt in enumerate(prompts)
    ]  # fmt: skip


def made(served: Served) -> Any:
    return served.tokens, served.guesses, served.stats


@pytest.mark.parametrize(
    "kind", ["latent", "rings", "states", "latent in float8", "rings in int8", "states in int8"]
)
def test_texts_are_those_without_pages(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefill, "CHUNK", CHUNK)
    model = target(kind)
    if model.model.reads_trees:
        tree = specjax.make_drafter(model, model, specjax.StaticTree, branching=(2, 1))
    else:
        tree = BoundDrafter(specjax.NGram(2, min_ngram=1))
    drafters = {"lookup": BoundDrafter(specjax.NGram(3, min_ngram=1)), "tree": tree}
    settings: dict[str, Any] = {"slots": 3, "capacity": 48, "chunk": CHUNK, "page": PAGE}
    results, copied = [], []
    for cache_tokens in (None, PAGE * 9, PAGE * 40):
        with Engine(model, drafters, **settings, cache_tokens=cache_tokens) as engine:
            compiled = engine.compiled()
            together = [engine.submit(one) for one in asks(kind)]
            results.append([handle.result(60) for handle in together])
            alone = [engine.submit(one, cache_salt="alone").result(60) for one in asks(kind)]
            assert list(map(made, alone)) == list(map(made, results[-1]))
            state = engine.load()
            copied.append(state.copied_tokens)
            assert state.free_pages == state.pages and engine.compiled() == compiled
    assert list(map(made, results[0])) == list(map(made, results[1]))
    assert list(map(made, results[0])) == list(map(made, results[2]))
    assert copied[2] > 0
    for one, served in zip(asks(kind), results[0], strict=True):
        plain = dataclasses.replace(one, proposer="none")
        fields = {f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}
        out = specjax.generate(model, fields.pop("prompts"), **fields)
        assert out.tokens[0] == served.tokens
