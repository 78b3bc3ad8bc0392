"""A case for every proposer, and decoders for the cases, over the targets of `toy_models.py`.

`TABLES` decodes a table model, in `tests/core`; `TRANSFORMERS` decodes a transformer, in
`tests/product` and `tests/process`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import block_toys
import jax
import jax.numpy as jnp
import numpy as np
from table_sources import TableBlockSource, TableSource, following, rows_of
from toy_models import CHOICES, EAGLE3, MTP, OTHER_VOCAB, OWN, SHARED, VOCAB, ToyModels
from trees import SampledTree

from specjax import RULES, Datastore, Decoder, Params, Sampling
from specjax.contract import BlockSource, Proposer, Source
from specjax.methods import (
    PROPOSERS,
    DatastoreSource,
    DraftSource,
    Eagle3Source,
    EarlyExitSource,
    MedusaSource,
    MtpLayersSource,
    MtpSource,
    PEagleSource,
    TranslatedParams,
    TranslatedSource,
)
from specjax.proposers import (
    MEASURED,
    PAUSE,
    Adaptive,
    AdaptiveParams,
    BestFirst,
    Calibrated,
    Chain,
    ChoiceTree,
    CostAware,
    CostAwareParams,
    DynamicTree,
    NGram,
    Shape,
    StaticTree,
)
from specjax.types import DecodeState

Case = tuple[Proposer, Any]
"""A proposer and its parameters."""

SHAPES = ((-1, 0, 0, 1, 1, 2, 3), (-1, 0, 1, 2, 0, 4, 0), (-1, 0, -1, 1, 0, 4, 4))
"""Breadth first, depth first, and one with an absent node."""

FEW = (
    ("none", "match"), ("table chain", "match"), ("table static tree", "rejection"),
    ("draft 3", "match"), ("adaptive", "match"), ("eagle3 tree", "rejection"),
    ("table best first, cost-aware", "match"),
)  # fmt: skip
"""Pairs over tables for laws of the decoder that no source can break: nothing drafted, a chain, a
tree, a draft model, a policy that chooses by costs, a head that reads its target, and a tree of
best candidates."""

NOISE_KINDS = ("match", "rejection")
"""A rule for each kind of noise, with which every proposer is tested.  The other rules meet one
proposer."""


class Cases(Mapping[str, Case]):
    """Cases that are made when they are first read: some fit heads to texts of the target."""

    def __init__(self, makers: Mapping[str, Callable[[], Case]]):
        self._makers, self._made = dict(makers), {}

    def __getitem__(self, name: str) -> Case:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def adaptive(seconds: tuple[float, ...], drafter: Any = None) -> AdaptiveParams:
    """The parameters of an `Adaptive` proposer of a lookup and a drafter."""
    return AdaptiveParams(
        None, drafter, jnp.array(seconds), jnp.array(MEASURED, jnp.int32), jnp.array([0.5, 0.4]),
        jnp.full(2, PAUSE, jnp.int32),
    )  # fmt: skip


def kind(proposer: Proposer) -> tuple[type, ...]:
    """The proposer's class, and for a shape also that of its source."""
    return (
        (type(proposer), type(proposer.source))
        if isinstance(proposer, Shape)
        else (type(proposer),)
    )


def shipped(base: type) -> list[type]:
    """The concrete classes for users that inherit from `base`."""
    below = [one for child in base.__subclasses__() for one in shipped(child)]
    own = base.__module__.startswith(
        ("specjax.proposers.", "specjax.methods.")
    ) and not inspect.isabstract(base)
    return [base, *below] if own else below


KINDS = {
    *((shape, source) for shape in shipped(Shape) for source in shipped(Source)),
    *((proposer,) for proposer in shipped(Proposer) if not issubclass(proposer, Shape)),
}
"""What the package can propose with: every shape over every source, and what is no shape."""


class Toys(ToyModels):
    """The cases over one of the targets."""

    NOISE_KINDS, KINDS, FEW = NOISE_KINDS, KINDS, FEW
    adaptive, kind = staticmethod(adaptive), staticmethod(kind)

    @property
    def noise(self) -> float:
        """With it a copy of the target agrees often, and not always."""
        return 0.02 if self.tabular else 0.03

    def _small(self) -> DraftSource:
        return DraftSource(self.model(num_layers=1), VOCAB)

    def _translated(self) -> tuple[TranslatedSource, TranslatedParams]:
        """A translated draft with room for one draft token per token, which the longest rows
        exceed."""
        tables = self.translation()
        params = TranslatedParams(self.respelt(self.weights(noise=self.noise), tables), tables)
        return TranslatedSource(self.model(OTHER_VOCAB), VOCAB, expansion=1), params

    def _eagle3(self) -> tuple[Eagle3Source, Any]:
        return Eagle3Source(EAGLE3, VOCAB, taps=(0, 2)), self.eagle3_params(self.weights())

    def _mtp(self) -> tuple[MtpSource, Any]:
        return MtpSource(MTP, VOCAB, taps=(2,)), self.mtp_params(self.weights())

    def _mtp_layers(self) -> tuple[MtpLayersSource, Any]:
        source = MtpLayersSource(MTP, VOCAB, taps=(2,), num_layers=2)
        return source, self.mtp_layers_params(self.weights())

    def _peagle(self) -> tuple[PEagleSource, Any]:
        params = self.eagle3_params(self.weights())
        own = {**params.own, "mask_hidden": self.weights()["embedding"][:2].ravel()}
        return PEagleSource(EAGLE3, VOCAB, 3, depth=3, taps=(0, 2)), params.replace(own=own)

    @functools.cache
    def datastore(self) -> Any:
        """The parameters of a datastore of texts that the target wrote after other prompts."""
        texts = self.greedy_texts()[:8].tolist()
        return Datastore.build(texts, vocab_size=VOCAB, capacity=512).arrays()

    @functools.cached_property
    def TABLE(self) -> dict[str, dict[str, Callable[[], Case]]]:
        """Cases of every name in `specjax.PROPOSERS`, made as that name makes them."""
        named, model = PROPOSERS, self.model
        return {
            "none": {
                "none": lambda: (named["none"](), None),
                "none padded": lambda: (named["none"](num_nodes=4), None),
            },
            "draft": {
                "draft 1": lambda: (
                    named["draft"](model(), VOCAB, 1), self.weights(noise=self.noise)
                ),
                "draft 3": lambda: (
                    named["draft"](model(), VOCAB, 3), self.weights(noise=self.noise)
                ),
                "draft 6": lambda: (
                    named["draft"](model(num_layers=1), VOCAB, 6, confidence_threshold=0.3),
                    self.truncated(),
                ),
            },
            "tree": {
                "draft tree": lambda: (
                    named["tree"](model(num_layers=1), VOCAB, (3, 1, 2)), self.truncated()
                )
            },
            "dynamic-tree": {
                "dynamic tree": lambda: (
                    named["dynamic-tree"](self._small(), 3, 2, 8), self.truncated()
                )
            },
            "early-exit": {
                "early exit": lambda: (named["early-exit"](model(), 1, 3), self.weights())
            },
            "first-of": {
                "first of": lambda: (
                    named["first-of"](
                        named["ngram"](3, min_ngram=1),
                        named["draft"](model(num_layers=1), VOCAB, 3),
                    ),
                    (None, self.truncated()),
                )
            },
            "medusa": {
                "medusa chain": lambda: (named["medusa"](OWN), self.medusa_params(own=True)),
                "medusa tree": lambda: (
                    named["medusa"](SHARED, CHOICES), self.medusa_params(own=False)
                ),
            },
            "datastore": {
                "datastore": lambda: (
                    named["datastore"](VOCAB, 3, min_share=0.2), self.datastore()
                ),
                "datastore tree": lambda: (
                    named["datastore"](VOCAB, branching=(3, 2)), self.datastore()
                ),
            },
            "forced": {"forced": lambda: (named["forced"](3), None)},
            "ngram": {"ngram": lambda: (named["ngram"](num_drafts=3, min_ngram=1), None)},
            "universal": {
                "universal": lambda: (
                    named["universal"](model(OTHER_VOCAB), VOCAB, 3, expansion=1),
                    self._translated()[1],
                )
            },
        }  # fmt: skip

    @functools.cached_property
    def CASES(self) -> Cases:
        """Those of `TABLE`, shapes over sources that have no name, and a tree whose shape changes
        in each step and has absent nodes."""
        cases: dict[str, Callable[[], Case]] = {
            **{name: case for cases in self.TABLE.values() for name, case in cases.items()},
            "datastore dynamic tree": lambda: (
                DynamicTree(DatastoreSource(VOCAB), 2, 2, 5), self.datastore()
            ),
            "adaptive": lambda: (
                Adaptive(NGram(3, min_ngram=1), Chain(self._small(), 3), (1, 2, 4)),
                adaptive((1.0, 1.05, 1.1, 1.3, 1.5), self.truncated()),
            ),
            "adaptive over eagle3": lambda: (
                Adaptive(None, Chain(self._eagle3()[0], 3), (1, 2, 4)),
                adaptive((1.0, 0.3, 0.3), self._eagle3()[1]),
            ),
            "translated tree": lambda: (
                StaticTree(self._translated()[0], (2, 1)), self._translated()[1]
            ),
            "translated dynamic tree": lambda: (
                DynamicTree(self._translated()[0], 2, 2, 5), self._translated()[1]
            ),
            "eagle3": lambda: (Chain(self._eagle3()[0], 3), self._eagle3()[1]),
            "eagle3 tree": lambda: (StaticTree(self._eagle3()[0], (2, 2, 1)), self._eagle3()[1]),
            "eagle3 dynamic tree": lambda: (
                DynamicTree(self._eagle3()[0], 3, 2, 7), self._eagle3()[1]
            ),
            "mtp tree": lambda: (StaticTree(self._mtp()[0], (2, 1)), self._mtp()[1]),
            "mtp layers": lambda: (Chain(self._mtp_layers()[0], 3), self._mtp_layers()[1]),
            "peagle tree": lambda: (ChoiceTree(self._peagle()[0], CHOICES), self._peagle()[1]),
            "tree": lambda: (SampledTree(self.model(), SHAPES), self.weights(noise=self.noise)),
            "best first": lambda: (
                BestFirst(MedusaSource(SHARED), 9, 4), self.medusa_params(own=False)
            ),
            "best first, cost-aware": lambda: (
                CostAware(BestFirst(MedusaSource(SHARED), 9, 4), (1, 4, 9)),
                CostAwareParams(self.medusa_params(own=False), jnp.array([1.0, 1.3, 1.7])),
            ),
            "block draft": lambda: (
                ChoiceTree(block_toys.PLAIN), block_toys.plain_params(self)
            ),
            "block draft tree": lambda: (
                ChoiceTree(
                    block_toys.CORRECTED, ((0,), (1,), (0, 0), (1, 0), (1, 1), (0, 0, 0))
                ),
                block_toys.corrected_params(self),
            ),
            "block draft best first": lambda: (
                BestFirst(block_toys.CORRECTED, 8, 3), block_toys.corrected_params(self)
            ),
        }  # fmt: skip
        if self.tabular:  # early exits have a test of their own, over the layers that they need
            del cases["early exit"]
            return Cases({**cases, **self._tabular()})
        return Cases(
            {
                **cases,
                "dynamic tree, calibrated": lambda: (
                    Calibrated(DynamicTree(self._small(), 3, 2, 6)), self.truncated()
                ),
                "early exit tree": lambda: (
                    StaticTree(EarlyExitSource(self.model(), 1), (2, 1)), self.weights()
                ),
                "early exit dynamic tree": lambda: (
                    DynamicTree(EarlyExitSource(self.model(), 1), 2, 2, 5), self.weights()
                ),
                "mtp": lambda: (Chain(self._mtp()[0], 3), self._mtp()[1]),
                "mtp dynamic tree": lambda: (
                    DynamicTree(self._mtp()[0], 3, 2, 7), self._mtp()[1]
                ),
                "mtp layers tree": lambda: (
                    StaticTree(self._mtp_layers()[0], (2, 1)), self._mtp_layers()[1]
                ),
                "mtp layers dynamic tree": lambda: (
                    DynamicTree(self._mtp_layers()[0], 3, 2, 7), self._mtp_layers()[1]
                ),
            }
        )  # fmt: skip

    def _tabular(self) -> dict[str, Callable[[], Case]]:
        """Every shape over a source that costs next to nothing."""

        def table(shape: Callable[[Source], Proposer]) -> Callable[[], Case]:
            return lambda: (shape(TableSource(VOCAB)), rows_of(self))

        def block(shape: Callable[[BlockSource], Proposer]) -> Callable[[], Case]:
            return lambda: (shape(TableBlockSource(VOCAB, 3)), following(self))

        return {
            "table chain": table(lambda source: Chain(source, 3)),
            "table static tree": table(lambda source: StaticTree(source, (3, 1, 2))),
            "table dynamic tree": table(lambda source: DynamicTree(source, 3, 2, 8)),
            "table choices": block(lambda source: ChoiceTree(source, CHOICES)),
            "table best first": block(lambda source: BestFirst(source, 7, 3)),
            "table best first, cost-aware": lambda: (
                CostAware(BestFirst(TableBlockSource(VOCAB, 3), 7, 3), (1, 4, 7)),
                CostAwareParams(following(self), jnp.array([1.0, 1.3, 1.7])),
            ),
            "table tree, adaptive": lambda: (
                Adaptive(
                    NGram(3, min_ngram=1),
                    Calibrated(DynamicTree(TableSource(VOCAB), 3, 2, 6)),
                    (1, 2, 4, 6),
                ),
                adaptive((1.0, 1.05, 1.1, 1.1, 1.3, 1.4, 1.05, 1.2), rows_of(self)),
            ),
            "table dynamic tree, calibrated": table(
                lambda source: Calibrated(DynamicTree(source, 3, 2, 6))
            ),
            "table best first, calibrated": lambda: (
                Calibrated(CostAware(BestFirst(TableBlockSource(VOCAB, 3), 7, 3), (1, 4, 7))),
                CostAwareParams(following(self), jnp.array([1.0, 1.3, 1.7])),
            ),
        }

    def judges(self, rule: str, case: str) -> bool:
        return self.CASES[case][0].is_chain or not RULES[rule].chain_only

    @functools.cached_property
    def PAIRS(self) -> list[tuple[str, str]]:
        return [
            (case, rule)
            for case in self.CASES
            for rule in RULES
            if rule in NOISE_KINDS or case == ("tree" if self.judges(rule, "tree") else "draft 3")
        ]

    def decoder(
        self,
        case: str,
        rule: str,
        eos: tuple[int, ...] = (ToyModels.EOS,),
        capacity: int = ToyModels.CAPACITY,
    ) -> Decoder:
        return Decoder(self.model(), self.CASES[case][0], RULES[rule](), eos, capacity)

    def params(self, case: str) -> Params:
        return Params(self.weights(), self.CASES[case][1])

    def prefill(
        self, dec: Decoder, arrays: Params, rows: Any = None, temperature: Any = 0.0, **changes: Any
    ) -> DecodeState:
        """Prefill the prompts, or those of `rows`; `changes` replace other arguments or
        settings."""
        names = ("top_k", "top_p", "min_p")
        settings = {name: changes.pop(name) for name in names if name in changes}
        processors = changes.pop("processors", None)
        fields = {
            "prompt": self.PROMPTS, "prompt_length": self.LENGTHS, "limit": self.LIMITS,
            "key": self.keys(), **changes,
        }  # fmt: skip
        if rows is not None:
            fields, processors = jax.tree.map(
                lambda value: value[np.array(rows)], (fields, processors)
            )
        # Copy, since `run` donates its arguments.
        fields, processors = jax.tree.map(jnp.array, (fields, processors))
        sampling = Sampling.create(len(fields["prompt"]), temperature, **settings)
        prompt, length = fields.pop("prompt"), fields.pop("prompt_length")
        return dec.prefill(
            arrays, prompt, length, sampling=sampling, processors=processors, **fields
        )

    @staticmethod
    def texts(state: DecodeState) -> list[list[int]]:
        """Prompt and output of every row."""
        tokens, length = np.asarray(state.tokens), np.asarray(state.length)
        return [row[:end].tolist() for row, end in zip(tokens, length, strict=True)]

    @functools.cache
    def decoded(
        self, case: str, rule: str, temperature: float = 0.0
    ) -> tuple[list[list[int]], DecodeState]:
        """The texts and last state of a whole run.  The state is shared, so do not pass it to
        `run`."""
        dec = self.decoder(case, rule)
        state = dec.run(
            self.params(case), self.prefill(dec, self.params(case), temperature=temperature)
        )
        return self.texts(state), jax.device_get(state.replace(key=None))


TABLES, TRANSFORMERS = Toys(tabular=True), Toys(tabular=False)
