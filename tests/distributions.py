"""Samples of three tokens beside their exact joint distribution: settings, texts and the test.

There are 4000 texts per setting (200 where only one text is possible), 5^3 possible texts, and a
chi-square test at p < 1e-6. Correct code fails one of 120 checks with a probability below 2e-4;
since the keys are fixed, it either always does or never. A bias with a chi-square divergence
sum((found - wanted)^2 / wanted) of 0.04 is caught with probability 0.99, for instance a joint
distribution 10 % off in total variation. The wrong rules of `WRONG` show that common mistakes are
larger than that.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import faults
import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from toys import Toys

from specjax import (
    Decoder,
    DraftModel,
    FirstOf,
    Forced,
    NGram,
    NoProposer,
    Params,
    Processors,
    Rejection,
    Sampling,
    Translation,
    Universal,
    UniversalParams,
    warp,
)
from specjax.contract import Source
from specjax.methods import DraftSource
from specjax.proposers import Adaptive, Chain
from specjax.types import Stats

VOCAB, NEW, EACH = 5, 3, 4000
PROMPT = (2, 0, 2, 0)
CAPACITY = len(PROMPT) + NEW
IMPLAUSIBLE = 1e-6
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot, top-k": {"temperature": 1.6, "top_k": 3},
    "top-p": {"top_p": 0.8},
    "all filters": {"temperature": 1.2, "top_k": 4, "top_p": 0.9, "min_p": 0.06},
    "greedy": {"temperature": 0.0},
}
TEXTS = {name: 200 if name == "greedy" else EACH for name in SETTINGS}
DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
EVERY = np.array(list(np.ndindex((VOCAB,) * NEW)))
"""[VOCAB^NEW, NEW]: all texts."""

TRANSLATION = Translation(
    pieces=jnp.array([[0, 0], [2, 3], [1, 0], [0, 0], [4, 0]]),
    count=jnp.array([1, 2, 1, 0, 1]),
    to_draft=jnp.array([0, -1, 1, -1, 4]),
    start=jnp.zeros(0, jnp.int32),
)
"""Three tokens are shared, one of them by another name; one is spelt in two, and one not at all."""
SHAPES = ((-1, 0, 0, 2), (-1, 0, 1, 0), (-1, 0, -1, 0))

WRONG = {
    "argmax drafts with soft probabilities": (faults.ArgmaxDraft, Rejection, "plain"),
    "noise repeated along a chain": (faults.RepeatedNoise, Rejection, "plain"),
    "drafts dropped for their own outcome": (faults.DropsUnlikely, Rejection, "plain"),
    "noise reused for the residual": (Chain, faults.ReusedNoise, "hot, top-k"),
    "noise shared with the acceptance": (Chain, faults.SharedAcceptance, "plain"),
    "no residual": (Chain, faults.NoResidual, "plain"),
}
"""The mistake, and the setting at which it shows."""


def probabilities(logits: Any) -> np.ndarray:
    """The softmax over the last axis, in float64."""
    logits = np.asarray(logits, np.float64)
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    return chances / chances.sum(-1, keepdims=True)


def chi_square(sample: np.ndarray, joint: np.ndarray) -> float:
    """The p-value of texts [rows, NEW] under their joint distribution; 0 if one of them is
    impossible."""
    counts = np.zeros((VOCAB,) * NEW)
    np.add.at(counts, tuple(sample.T), 1)
    counts, expected = counts.ravel(), len(sample) * joint.ravel()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    return scipy.stats.chisquare(counts, expected).pvalue if len(counts) > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class Distributions:
    """Samples from a small target of `toys`."""

    toys: Toys

    def net(self, layers: int = 1) -> Any:
        return self.toys.model(VOCAB, num_layers=layers)

    def weights(self, noise: float = 0.0, keep: int | None = None, layers: int = 1) -> Any:
        return self.toys.flat(VOCAB, noise, keep, layers)

    @functools.cached_property
    def small(self) -> DraftSource:
        """A draft model of another vocabulary; its parameters are `drafting`."""
        return DraftSource(self.toys.model(VOCAB - 1, num_layers=1), VOCAB)

    @functools.cached_property
    def drafting(self) -> Any:
        return self.weights(0.05, VOCAB - 1)

    @functools.cached_property
    def rows(self) -> jax.Array:
        """[V, V]: logits after a token, for a `TableSource`; the target's, in another text."""
        texts = np.array([[0, token] for token in range(VOCAB)])
        return jnp.asarray(self.toys.plain_logits(texts, self.net(), self.weights())[:, 1])

    @functools.cached_property
    def ahead(self) -> jax.Array:
        """[2, V, V]: logits of the next tokens for a `TableBlockSource`, as if texts followed from
        one token each."""
        once = probabilities(self.rows)
        return jnp.asarray(np.log(np.stack([once, once @ once])), jnp.float32)

    @functools.cached_property
    def CASES(self) -> dict[str, tuple[Any, Callable[[], Any]]]:
        """What is sampled over either target: proposers, and what makes their parameters."""
        small, drafting = self.small.model, lambda: self.drafting
        return {
            "none": (NoProposer(), lambda: None),
            "draft": (DraftModel(small, VOCAB, 2), drafting),
            "draft, 0 to 2 drafts a row": (DraftModel(small, VOCAB, 2), drafting),
            "draft with a confidence stop": (DraftModel(small, VOCAB, 2, 0.3), drafting),
            "adaptive": (
                Adaptive(NGram(2, min_ngram=1), Chain(self.small, 2), (1, 2, 3)),
                lambda: self.toys.adaptive((1.0, 1.05, 1.1, 1.3, 1.4), self.drafting),
            ),
            "first of": (
                FirstOf(NGram(2, min_ngram=2), DraftModel(small, VOCAB, 2)),
                lambda: (None, self.drafting),
            ),
            "forced": (Forced(2), lambda: None),  # sampled with a constraint, too
            "ngram": (NGram(num_drafts=2), lambda: None),
            "universal": (
                Universal(self.net(), VOCAB, 2),
                lambda: UniversalParams(self.weights(0.05), TRANSLATION),
            ),
        }

    def sample(
        self,
        dec: Decoder,
        params: Any,
        seed: int,
        settings: dict[str, Any],
        rows: int = EACH,
        layers: int = 1,
        processors: Processors | None = None,
        num_drafts: Any = None,
    ) -> tuple[np.ndarray, Stats]:
        """Tokens [rows, NEW], with 0 behind an end, and figures.

        Args:
          dec: the decoder, or what has its functions.
          params: of the proposer.
          seed: of the rows' keys.
          settings: of all rows, or an array for each.
        """
        arrays, start = Params(self.weights(layers=layers), params), len(PROMPT)
        more = {} if num_drafts is None else {"num_drafts": num_drafts}
        state = dec.prefill(
            arrays,
            prompt=jnp.asarray(np.tile(PROMPT, (rows, 1))),
            prompt_length=jnp.asarray(np.full(rows, start)),
            limit=jnp.asarray(np.full(rows, CAPACITY)),
            sampling=Sampling.create(rows, **settings),
            key=self.toys.keys(rows, seed=seed),
            processors=processors,
            **more,
        )
        state = jax.device_get(dec.run(arrays, state).replace(key=None))
        inside = np.arange(start, CAPACITY) < state.length[:, None]
        return np.where(inside, state.tokens[:, start:CAPACITY], 0), state.stats

    def texts(
        self,
        proposer: Any,
        params: Any,
        rule: Any,
        layers: int = 1,
        bounded: bool = False,
        names: Sequence[str] = tuple(SETTINGS),
    ) -> tuple[dict[str, np.ndarray], Stats]:
        """Tokens [texts, NEW] of each setting of `names`, and figures: one batch in which every
        row has its own settings, key and, if `bounded`, its own number of drafts, 0 to 2."""
        each = [TEXTS[name] for name in names]
        rows = [DEFAULTS | SETTINGS[name] for name in names]
        settings = {name: np.repeat([s[name] for s in rows], each) for name in DEFAULTS}
        dec = Decoder(self.net(layers), proposer, rule, (), CAPACITY)
        bounds = np.arange(sum(each), dtype=np.int32) % 3 if bounded else None
        tokens, stats = self.sample(dec, params, 17, settings, sum(each), layers, None, bounds)
        return dict(zip(names, np.split(tokens, np.cumsum(each)[:-1]), strict=True)), stats

    @functools.cache  # noqa: B019 - there are two of them
    def logits(self, layers: int = 1) -> np.ndarray:
        """[VOCAB^NEW, NEW, VOCAB]: those after the prompt and the text so far, by a plain pass."""
        whole = np.concatenate([np.tile(PROMPT, (len(EVERY), 1)), EVERY], axis=1)
        read = self.toys.plain_logits(whole, self.net(layers), self.weights(layers=layers))
        return read[:, len(PROMPT) - 1 : -1]

    @functools.cache  # noqa: B019
    def wanted(self, setting: str, layers: int = 1) -> np.ndarray:
        """[VOCAB] * NEW: the exact joint distribution."""
        logits = jnp.asarray(self.logits(layers))
        settings = Sampling.create(len(EVERY), **SETTINGS[setting])
        probs = probabilities(_warp(logits, settings))
        chosen = np.take_along_axis(probs, EVERY[:, :, None], axis=2)[:, :, 0].prod(1)
        return (chosen / chosen.sum()).reshape((VOCAB,) * NEW)

    def joint(self, follow: Callable[[list[int], np.ndarray], np.ndarray], end: int) -> np.ndarray:
        """[VOCAB] * NEW: the joint distribution of texts that `end` may end, then 0.

        Args:
          follow: the probabilities [VOCAB] of the token after a text without its prompt, from the
            target's logits there.
          end: the token that ends a text.
        """
        chances = np.zeros((VOCAB,) * NEW)
        for new, rows in zip(EVERY.tolist(), self.logits(), strict=True):
            stop = new.index(end) + 1 if end in new else len(new)
            if any(new[stop:]):
                continue
            chance = 1.0
            for n, token in enumerate(new[:stop]):
                chance = chance and chance * float(follow(new[:n], rows[n])[token])
            chances[tuple(new)] += chance
        assert abs(chances.sum() - 1) < 1e-5
        return chances / chances.sum()

    def p_value(self, sample: np.ndarray, setting: str, layers: int = 1) -> float:
        """The p-value of the texts under a setting."""
        return chi_square(sample, self.wanted(setting, layers))

    def check_the_settings(self) -> None:
        """The distributions are spread out, differ from each other, and filters exclude texts."""
        for setting in SETTINGS:
            possible = (self.wanted(setting) > 0).sum()
            assert possible == 1 if setting == "greedy" else possible >= 8
        assert (self.wanted("plain") > 0).all()
        assert np.abs(self.wanted("plain") - self.wanted("cold")).sum() > 0.2

    def check_a_mistake(self, mistake: str, source: Source, params: Any) -> None:
        """The samples of a wrong rule, or of a wrong chain over a source, are implausible at its
        setting, and greedy ones are right."""
        proposer, rule, setting = WRONG[mistake]
        sample, _ = self.texts(proposer(source, 2), params, rule(), names=(setting, "greedy"))
        assert self.p_value(sample[setting], setting) < IMPLAUSIBLE
        assert self.p_value(sample["greedy"], "greedy") == 1


_warp = jax.jit(warp)
