"""A case for every proposer, decoders for the cases, and the tiny models of `toy_models.py`."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import block_toys
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import (  # noqa: F401 - the tests use these names as toys.X
    CAPACITY,
    CHOICES,
    EAGLE3,
    EOS,
    LENGTHS,
    LIMITS,
    OTHER_VOCAB,
    OWN,
    PROMPTS,
    ROWS,
    SHARED,
    VOCAB,
    WIDTH,
    committed,
    eagle3_params,
    flat,
    greedy_texts,
    keys,
    medusa_params,
    model,
    naive_greedy,
    noisy_heads,
    plain_logits,
    plain_output,
    respelt,
    revocabulated,
    translation,
    truncated,
    weights,
)
from trees import SampledTree

from specjax import RULES, Datastore, Decoder, Params, Sampling
from specjax.contract import Proposer, Source
from specjax.proposers import (
    MEASURED,
    PAUSE,
    PROPOSERS,
    Adaptive,
    AdaptiveParams,
    BestFirst,
    Chain,
    ChoiceTree,
    CostAware,
    CostAwareParams,
    DatastoreSource,
    DraftSource,
    DynamicTree,
    Eagle3Source,
    EarlyExitSource,
    MedusaSource,
    NGram,
    PEagleSource,
    Shape,
    StaticTree,
    TranslatedParams,
    TranslatedSource,
)
from specjax.types import DecodeState

NOISE = 0.03
SHAPES = ((-1, 0, 0, 1, 1, 2, 3), (-1, 0, 1, 2, 0, 4, 0), (-1, 0, -1, 1, 0, 4, 4))
"""Breadth first, depth first, and one with an absent node."""


def _small() -> DraftSource:
    return DraftSource(model(num_layers=1), VOCAB)


def _translated() -> tuple[TranslatedSource, TranslatedParams]:
    """A translated draft with room for one draft token per token, which the longest rows exceed."""
    params = TranslatedParams(respelt(weights(noise=NOISE), translation()), translation())
    return TranslatedSource(model(OTHER_VOCAB), VOCAB, expansion=1), params


def _eagle3() -> tuple[Eagle3Source, Any]:
    return Eagle3Source(EAGLE3, VOCAB, taps=(0, 2)), eagle3_params(weights())


def _peagle() -> tuple[PEagleSource, Any]:
    params = eagle3_params(weights())
    own = {**params.own, "mask_hidden": weights()["embedding"][:2].ravel()}
    return PEagleSource(EAGLE3, VOCAB, 3, depth=3, taps=(0, 2)), params.replace(own=own)


@functools.cache
def datastore() -> Any:
    """The parameters of a datastore of texts that the target wrote after other prompts."""
    texts = greedy_texts()[:8].tolist()
    return Datastore.build(texts, vocab_size=VOCAB, capacity=512).arrays()


def adaptive(seconds: tuple[float, ...], drafter: Any = None) -> AdaptiveParams:
    """The parameters of an `Adaptive` proposer of a lookup and a drafter."""
    return AdaptiveParams(
        None, drafter, jnp.array(seconds), jnp.array(MEASURED, jnp.int32), jnp.array([0.5, 0.4]),
        jnp.full(2, PAUSE, jnp.int32),
    )  # fmt: skip


TABLE: dict[str, dict[str, tuple[Proposer, Any]]] = {
    "none": {
        "none": (PROPOSERS["none"](), None),
        "none padded": (PROPOSERS["none"](num_nodes=4), None),
    },
    "draft": {
        "draft 1": (PROPOSERS["draft"](model(), VOCAB, 1), weights(noise=NOISE)),
        "draft 3": (PROPOSERS["draft"](model(), VOCAB, 3), weights(noise=NOISE)),
        "draft 6": (
            PROPOSERS["draft"](model(num_layers=1), VOCAB, 6, confidence_threshold=0.3),
            truncated(),
        ),
    },
    "tree": {"draft tree": (PROPOSERS["tree"](model(num_layers=1), VOCAB, (3, 1, 2)), truncated())},
    "dynamic-tree": {"dynamic tree": (PROPOSERS["dynamic-tree"](_small(), 3, 2, 8), truncated())},
    "early-exit": {"early exit": (PROPOSERS["early-exit"](model(), 1, 3), weights())},
    "first-of": {
        "first of": (
            PROPOSERS["first-of"](
                PROPOSERS["ngram"](3, min_ngram=1),
                PROPOSERS["draft"](model(num_layers=1), VOCAB, 3),
            ),
            (None, truncated()),
        )
    },
    "medusa": {
        "medusa chain": (PROPOSERS["medusa"](OWN), medusa_params(own=True)),
        "medusa tree": (PROPOSERS["medusa"](SHARED, CHOICES), medusa_params(own=False)),
    },
    "datastore": {
        "datastore": (PROPOSERS["datastore"](VOCAB, 3, min_share=0.2), datastore()),
        "datastore tree": (PROPOSERS["datastore"](VOCAB, branching=(3, 2)), datastore()),
    },
    "forced": {"forced": (PROPOSERS["forced"](3), None)},
    "ngram": {"ngram": (PROPOSERS["ngram"](num_drafts=3, min_ngram=1), None)},
    "universal": {
        "universal": (
            PROPOSERS["universal"](model(OTHER_VOCAB), VOCAB, 3, expansion=1),
            _translated()[1],
        )
    },
}
"""Cases of every name in `specjax.PROPOSERS`, made as that name makes them."""

CASES: dict[str, tuple[Proposer, Any]] = {
    **{name: case for cases in TABLE.values() for name, case in cases.items()},
    "datastore dynamic tree": (DynamicTree(DatastoreSource(VOCAB), 2, 2, 5), datastore()),
    "adaptive": (
        Adaptive(NGram(3, min_ngram=1), Chain(_small(), 3), (1, 2, 4)),
        adaptive((1.0, 1.05, 1.1, 1.3, 1.5), truncated()),
    ),
    "adaptive over eagle3": (
        Adaptive(None, Chain(_eagle3()[0], 3), (1, 2, 4)),
        adaptive((1.0, 0.3, 0.3), _eagle3()[1]),
    ),
    "early exit tree": (StaticTree(EarlyExitSource(model(), 1), (2, 1)), weights()),
    "early exit dynamic tree": (DynamicTree(EarlyExitSource(model(), 1), 2, 2, 5), weights()),
    "translated tree": (StaticTree(_translated()[0], (2, 1)), _translated()[1]),
    "translated dynamic tree": (DynamicTree(_translated()[0], 2, 2, 5), _translated()[1]),
    "eagle3": (Chain(_eagle3()[0], 3), _eagle3()[1]),
    "eagle3 tree": (StaticTree(_eagle3()[0], (2, 2, 1)), _eagle3()[1]),
    "eagle3 dynamic tree": (DynamicTree(_eagle3()[0], 3, 2, 7), _eagle3()[1]),
    "peagle tree": (ChoiceTree(_peagle()[0], CHOICES), _peagle()[1]),
    "tree": (SampledTree(model(), SHAPES), weights(noise=NOISE)),
    "best first": (BestFirst(MedusaSource(SHARED), 9, 4), medusa_params(own=False)),
    "best first, cost-aware": (
        CostAware(BestFirst(MedusaSource(SHARED), 9, 4), (1, 4, 9)),
        CostAwareParams(medusa_params(own=False), jnp.array([1.0, 1.3, 1.7])),
    ),
    "block draft": (ChoiceTree(block_toys.PLAIN), block_toys.plain_params()),
    "block draft tree": (
        ChoiceTree(block_toys.CORRECTED, ((0,), (1,), (0, 0), (1, 0), (1, 1), (0, 0, 0))),
        block_toys.corrected_params(),
    ),
    "block draft best first": (
        BestFirst(block_toys.CORRECTED, 8, 3),
        block_toys.corrected_params(),
    ),
}
"""Those of `TABLE`, shapes over sources that have no name, and a tree whose shape changes each
step and has absent nodes."""


def kind(proposer: Proposer) -> tuple[type, ...]:
    """The proposer's class, and for a shape also that of its source."""
    return (
        (type(proposer), type(proposer.source))
        if isinstance(proposer, Shape)
        else (type(proposer),)
    )


def _shipped(base: type) -> list[type]:
    """The concrete classes for users that inherit from `base`."""
    below = [one for child in base.__subclasses__() for one in _shipped(child)]
    own = base.__module__.startswith("specjax.proposers.") and not inspect.isabstract(base)
    return [base, *below] if own else below


KINDS = {
    *((shape, source) for shape in _shipped(Shape) for source in _shipped(Source)),
    *((proposer,) for proposer in _shipped(Proposer) if not issubclass(proposer, Shape)),
}
"""What the package can propose with: every shape over every source, and what is no shape."""

NOISE_KINDS = ("match", "rejection")
"""A rule for each kind of noise, with which every proposer is tested. The others meet one
proposer."""


def judges(rule: str, case: str) -> bool:
    return CASES[case][0].is_chain or not RULES[rule].chain_only


PAIRS = [
    (case, rule)
    for case in CASES
    for rule in RULES
    if rule in NOISE_KINDS or case == ("tree" if judges(rule, "tree") else "draft 3")
]

ALONE = [
    (case, rule)
    for case in ("none", "draft 3", "ngram", "universal", "tree")
    for rule in NOISE_KINDS
] + [
    ("draft tree", "rejection"),
    ("dynamic tree", "match"),
    ("early exit", "match"),
    ("early exit tree", "match"),
    ("early exit dynamic tree", "rejection"),
    ("translated tree", "rejection"),
    ("translated dynamic tree", "match"),
    ("datastore", "match"),
    ("forced", "match"),
    ("datastore tree", "rejection"),
    ("datastore dynamic tree", "match"),
    ("first of", "rejection"),
    ("adaptive", "match"),
    ("adaptive", "rejection"),
    ("eagle3", "match"),
    ("eagle3 tree", "rejection"),
    ("eagle3 dynamic tree", "match"),
    ("medusa tree", "match"),
    ("medusa tree", "rejection"),
    ("best first", "match"),
    ("best first", "rejection"),
    ("best first, cost-aware", "match"),
    ("best first, cost-aware", "rejection"),
    ("block draft", "rejection"),
    ("block draft tree", "rejection"),
    ("block draft best first", "match"),
    ("block draft best first", "rejection"),
]
"""Pairs that are also compiled for a single row: each proposer at least once."""

COVERING = {
    ("none", "match"), ("ngram", "match"), ("draft 3", "match"), ("draft 3", "rejection"),
    ("tree", "match"), ("tree", "rejection"), ("early exit tree", "match"),
    ("translated dynamic tree", "match"), ("datastore tree", "rejection"),
    ("eagle3 tree", "rejection"), ("first of", "rejection"), ("medusa tree", "match"),
    ("best first", "rejection"), ("best first, cost-aware", "match"),
    ("adaptive", "match"), ("adaptive", "rejection"), ("forced", "match"),
    ("block draft tree", "rejection"),
}  # fmt: skip
"""The part of `ALONE` that runs by default: each shape, each source, and each proposer that is
neither, under one kind of noise; a chain and a tree under both. A shape sees a source through
`contract.Source` alone, and a rule sees no proposer, so what a shape over one source keeps does not
depend on the source."""


FEW = {
    ("none", "match"), ("draft 3", "match"), ("tree", "rejection"), ("adaptive", "match"),
    ("eagle3 tree", "rejection"), ("best first, cost-aware", "match"),
}  # fmt: skip
"""The part of `COVERING` with which the more expensive laws run by default: nothing drafted, a
chain, a tree from a table, a policy that chooses by costs, a head that reads its target, and a tree
of best candidates."""


def covering(pairs: Any, kept: Any = COVERING) -> list[Any]:
    """The pairs as parameters; those outside `kept` are slow."""
    return [pytest.param(*p, marks=() if p in kept else pytest.mark.slow) for p in pairs]


def decoder(
    case: str, rule: str, eos: tuple[int, ...] = (EOS,), capacity: int = CAPACITY
) -> Decoder:
    return Decoder(model(), CASES[case][0], RULES[rule](), eos, capacity)


def params(case: str) -> Params:
    return Params(weights(), CASES[case][1])


def prefill(
    dec: Decoder, arrays: Params, rows: Any = None, temperature: Any = 0.0, **changes: Any
) -> DecodeState:
    """Prefill the prompts, or those of `rows`; `changes` replace other arguments or settings."""
    settings = {name: changes.pop(name) for name in ("top_k", "top_p", "min_p") if name in changes}
    processors = changes.pop("processors", None)
    fields = {"prompt": PROMPTS, "prompt_length": LENGTHS, "limit": LIMITS, "key": keys()} | changes
    if rows is not None:
        fields, processors = jax.tree.map(lambda value: value[np.array(rows)], (fields, processors))
    # Copy, since `run` donates its arguments.
    fields, processors = jax.tree.map(jnp.array, (fields, processors))
    sampling = Sampling.create(len(fields["prompt"]), temperature, **settings)
    prompt, length = fields.pop("prompt"), fields.pop("prompt_length")
    return dec.prefill(arrays, prompt, length, sampling=sampling, processors=processors, **fields)


def texts(state: DecodeState) -> list[list[int]]:
    """Prompt and output of every row."""
    tokens, length = np.asarray(state.tokens), np.asarray(state.length)
    return [row[:end].tolist() for row, end in zip(tokens, length, strict=True)]


@functools.cache
def decoded(case: str, rule: str, temperature: float = 0.0) -> tuple[list[list[int]], DecodeState]:
    """The texts and last state of a whole run. The state is shared, so do not pass it to `run`."""
    dec = decoder(case, rule)
    state = dec.run(params(case), prefill(dec, params(case), temperature=temperature))
    return texts(state), jax.device_get(state.replace(key=None))
