"""Each source of drafts, without a decoder.

The logits that a source returns along a text are those of a naive pass over the same text without a
cache.  `drive` commits blocks of different sizes to the rows of a batch, and asks in each step for
the logits after the text and after drafts below it, of which some are right.  So this one law holds
`init`, `read`, `truncate`, `begin`, `extend`, `read_tree`, `marginals`, `correct`, `end`,
`observe`, `rest` and `resume`.  `test_laws_chains.py` and `test_laws_trees.py` hold the shapes over
sources that are tables.

The file is long because every source has its case here: one law, and one way to drive them all.
`core/test_sources.py` and `core/test_sources_of_features.py` hold the sources to it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from block_reference import sigmoid
from block_toys import PLAIN
from naive_assistant import NaiveAssistant
from naive_mtp import NaiveMtpLayers
from naive_sources import NaiveBlock, NaiveTable, drawn, naive_eagle3, naive_mtp
from started import started
from table_model import TableModel, tables
from toy_models import EAGLE3, OTHER_VOCAB, SEED, VOCAB, transformer, translation
from votes import contexts, mixed

from specjax import Datastore
from specjax.caches import KVCache, RecurrentCache
from specjax.contract import BlockSource, Context, Lookahead
from specjax.contract.proposer import before
from specjax.methods import (
    AssistantConfig,
    AssistantSource,
    BlockDraft,
    BlockDraftSource,
    CandidateSelector,
    Correction,
    DatastoreSource,
    DraftSource,
    Eagle3Source,
    EarlyExitSource,
    MarkovHead,
    MedusaHeads,
    MedusaParams,
    MedusaSource,
    MtpConfig,
    MtpLayersSource,
    MtpSource,
    NearSelfSource,
    PEagleSource,
    PrefixGRU,
    SharedParams,
    TranslatedParams,
    TranslatedSource,
    assistant_shapes,
    eagle3_shapes,
    initial_block,
    mtp_shapes,
    part_name,
)
from specjax.models import AttentionSizes, Rope, TransformerConfig, from_function
from specjax.types import ABSENT, Block, Proposal

ROWS, CAPACITY, DEPTH, STEPS, NOISE = 4, 64, 3, 11, 50.0
FULL = 24
"""Tokens of a text for which a source has room; some texts become as long."""
LENGTHS = np.array([5, 2, 1, 8], np.int32)
"""Of the prompts, with the pending token; one has one more, one nothing else, and one fills the
array."""
DONE = 5
"""The step from which row 1 commits nothing."""
TEXTS = np.random.default_rng(0).integers(1, VOCAB, (ROWS, CAPACITY)).astype(np.int32)
TARGET = NaiveTable(tables(VOCAB, SEED), memory=3)
TABLE = {"embedding": TARGET.embedding, "head": {"kernel": TARGET.head}}
PAIRED = Eagle3Source | MtpSource | MtpLayersSource | AssistantSource
"""The sources that know every node of a row but the pending token of a text of one."""

LEVELS = np.array([0, 0, 0, 1, 1, 2, 2])
"""The depth of each node of a tree below the pending token."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A source, and what it should say."""

    source: Any
    params: Any
    logits: Callable[[list[int], tuple[int, ...]], np.ndarray]  # after a text and drafts below it
    kind: str = "chain"  # or "tree" or "block"
    within: float = 0.0
    capacity: int = FULL
    left: Callable[[list[int]], int] = lambda text: FULL - len(text)  # of the capacity
    # Can it read the pending token of a text, of which so many tokens are new to it?
    reads: Callable[[list[int], int], bool] = lambda text, new: True
    knows: Callable[[int], bool] = lambda token: True  # can it read this draft?
    goes_on: Callable[[list[int], tuple[int, ...]], bool] | None = None
    # The target's cache after so many tokens [B] of the texts, for a source that reads it.
    cache: Callable[[Any], Any] = lambda count: None


def table_draft(model: TableModel, kind: str) -> Case:
    """A draft model whose vocabulary may be smaller or larger than the target's."""
    params = tables(model.vocab_size, SEED, 0.02)
    naive, size = NaiveTable(params, model.memory), model.vocab_size

    def logits(text: list[int], path: tuple[int, ...]) -> np.ndarray:
        row = naive.logits([min(token, size - 1) for token in (*text, *path)])
        return np.concatenate([row, np.full(max(VOCAB - size, 0), -np.inf)])[:VOCAB]

    return Case(DraftSource(model, VOCAB), params, logits, kind)


def recurrent_draft() -> Case:
    """A draft model whose cache neither keeps scratch nor reads trees."""
    params = {"embedding": TARGET.embedding, "head": TARGET.head}

    def apply(params: Any, tokens: Any, positions: Any, cache: RecurrentCache, mask: Any) -> Any:
        def turn(state: Any, x: Any) -> Any:
            state = 0.5 * state + x
            return state, state

        hidden, cache = cache.scan(turn, params["embedding"][tokens])
        return hidden @ params["head"], cache

    def empty(rows: int, _: int) -> RecurrentCache:
        return RecurrentCache.create(jnp.zeros((rows, 32)))

    model = from_function(apply, vocab_size=VOCAB, max_positions=CAPACITY, init_cache=empty)

    def logits(text: list[int], path: tuple[int, ...]) -> np.ndarray:
        tokens = [*text, *path]
        shares = 0.5 ** np.arange(len(tokens))[::-1]
        return shares @ TARGET.embedding[tokens] @ TARGET.head

    return Case(DraftSource(model, VOCAB), params, logits, within=1e-5)


def translated(kind: str) -> Case:
    """A draft with other tokens, whose room is full before the longest texts end."""
    words, capacity, expansion = jax.device_get(translation()), 12, 2
    params = tables(OTHER_VOCAB, SEED)
    naive = NaiveTable(params, memory=3)

    def spelt(text: list[int]) -> list[int]:
        return [int(p) for token in text for p in words.pieces[token, : words.count[token]]]

    def logits(text: list[int], path: tuple[int, ...]) -> np.ndarray:
        row = naive.logits([*words.start, *spelt(text), *(int(words.to_draft[t]) for t in path)])
        return np.where(words.to_draft >= 0, row[words.to_draft], -np.inf)

    def left(text: list[int]) -> int:
        return capacity * expansion - len(spelt(text[:-1]))

    def reads(text: list[int], new: int) -> bool:
        return left(text) >= 0 and len(spelt(text[-new:])) > 0

    source = TranslatedSource(TableModel(OTHER_VOCAB), VOCAB, expansion)
    return Case(
        source, TranslatedParams(params, translation()), logits, kind, capacity=capacity,
        left=left, reads=reads, knows=lambda token: bool(words.to_draft[token] >= 0),
    )  # fmt: skip


def has_a_feature(text: list[int], _: int) -> bool:
    return len(text) > 1


def eagle3(kind: str) -> Case:
    """A head as of EAGLE-3.1, with a reduced vocabulary."""
    network = dataclasses.replace(EAGLE3, fc_norm=True, feeds_normed=True)
    taps, rng = (0, 2), np.random.default_rng(3)
    kept = np.sort(rng.permutation(VOCAB)[:20])
    to_draft = np.full(VOCAB, -1, np.int32)
    to_draft[kept] = np.arange(len(kept))
    own = {"network": drawn(eagle3_shapes(network), 1), "to_draft": to_draft,
           "head": {"kernel": rng.normal(size=(32, len(kept))).astype(np.float32)}}  # fmt: skip
    naive = naive_eagle3(
        network, own, TARGET.embedding, own["head"]["kernel"],
        lambda text: TARGET.features(text, taps),
    )  # fmt: skip
    params = SharedParams(own, {"embedding": TARGET.embedding})
    source = Eagle3Source(network, VOCAB, taps)
    return Case(source, params, naive.logits, kind, 1e-4, reads=has_a_feature)


def mtp(kind: str, head_tokens: int | None = None, **switches: bool) -> Case:
    """A layer that uses the target's embedding and head, or its first columns."""
    network = MtpConfig(EAGLE3.layers, **switches)
    own = {"network": drawn(mtp_shapes(network), 5)}
    naive = naive_mtp(
        network, own, TARGET.embedding, TARGET.head, lambda text: TARGET.features(text, (3,))
    )
    source = MtpSource(network, VOCAB, (3,), head_tokens)
    params = SharedParams(own, TABLE)

    def logits(text: list[int], path: tuple[int, ...]) -> np.ndarray:
        drafted = np.arange(VOCAB) < (head_tokens or VOCAB)
        return np.where(drafted, naive.logits(text, path), -np.inf)

    return Case(source, params, logits, kind, 1e-4, reads=has_a_feature)


def mtp_layers(kind: str, count: int, **switches: bool) -> Case:
    """Several layers, one for each depth; the last drafts what is deeper."""
    network = MtpConfig(EAGLE3.layers, **switches)
    own = {part_name(k): drawn(mtp_shapes(network), 5 + k) for k in range(count)}
    naive = NaiveMtpLayers([
        naive_mtp(
            network, {"network": layer}, TARGET.embedding, TARGET.head,
            lambda text: TARGET.features(text, (3,)),
        )
        for layer in own.values()
    ])  # fmt: skip
    source = MtpLayersSource(network, VOCAB, (3,), count)
    params = SharedParams({"network": own}, TABLE)
    return Case(source, params, naive.logits, kind, 1e-4, reads=has_a_feature)


def peagle() -> Case:
    network = dataclasses.replace(EAGLE3, norm_before_fc=True, norm_before_residual=True)
    taps = (1, 3)
    own = {"network": drawn(eagle3_shapes(network), 2), "mask_hidden": TARGET.embedding[:2].ravel()}
    naive = naive_eagle3(
        network, own, TARGET.embedding, TARGET.head, lambda text: TARGET.features(text, taps)
    )
    source = PEagleSource(network, VOCAB, 3, DEPTH, taps)
    block = functools.cache(lambda text: naive.block(list(text), 3, DEPTH))
    return Case(
        source, SharedParams(own, TABLE), lambda text, path: block(tuple(text))[len(path)], "block",
        1e-4, reads=has_a_feature,
    )  # fmt: skip


def assistant(kind: str, window: int, clusters: int | None = None) -> Case:
    """Its target has a layer with a window, and then one without, of other sizes."""
    sliding, full = AttentionSizes(2, 8), AttentionSizes(1, 12)
    layers = TransformerConfig(
        vocab_size=VOCAB, hidden_size=20, mlp_size=24, num_layers=4, num_heads=4, num_kv_heads=2,
        head_dim=8, max_positions=CAPACITY, rope=Rope(), ropes=(Rope(100.0), Rope(1e3)) * 2,
        windows=(window, None) * 2, norm_order="sandwich", qk_norm="head", query_scale=1.0,
        activation="gelu_tanh", layer_scale=True,
        mixers=(sliding, full, AttentionSizes(2, 8, shared=True),
                AttentionSizes(1, 12, shared=True)),
    )  # fmt: skip
    network = AssistantConfig(
        layers, 32, embedding_scale=2.0, num_clusters=clusters, clusters_read=3
    )
    rng = np.random.default_rng(6)
    own = {
        "network": drawn(assistant_shapes(network), 7),
        "table": rng.normal(size=(VOCAB, 20)).astype(np.float32),
        "order": rng.permutation(VOCAB).astype(np.int32),
    }
    own = own if clusters else {name: own[name] for name in ("network", "table")}
    slots = FULL + 12
    memories = [
        [rng.normal(size=(ROWS, heads, slots, size)).astype(np.float32) for _ in range(2)]
        for heads, size in ((2, 8), (1, 12))
    ]
    naive, taps = NaiveAssistant(network, own, TARGET.embedding), (3,)

    def cache(count: Any) -> KVCache:
        keys, values = (tuple(jnp.asarray(pair[n]) for pair in memories) for n in range(2))
        return KVCache(keys, values, jnp.asarray(count, jnp.int32))

    def logits(text: list[int], path: tuple[int, ...]) -> np.ndarray:
        row = next(b for b in range(ROWS) if TEXTS[b, : len(text)].tolist() == text)
        count = len(text) - 1
        read = [[x[row, :, :count].swapaxes(0, 1) for x in pair] for pair in memories]
        hidden = np.float64(TARGET.features(text[:-1], taps)[-1])
        return naive.logits(hidden, text[-1], path, read)

    source = AssistantSource(network, VOCAB, (0, 1), taps)
    params = SharedParams(own, {"embedding": TARGET.embedding})
    return Case(source, params, logits, kind, 1e-4, reads=has_a_feature, cache=cache)


def medusa() -> Case:
    """Heads that share the target's output; row 1 takes the second adapter, row 2 has none."""
    heads = MedusaHeads(num_heads=DEPTH, hidden_size=32, vocab_size=VOCAB, num_layers=2)
    rng, adapters = np.random.default_rng(4), (0, 1, -1, 0)
    bank = {
        "kernel": rng.normal(0, 0.2, (2, 2, DEPTH, 32, 32)).astype(np.float32),
        "bias": rng.normal(0, 0.2, (2, 2, DEPTH, 32)).astype(np.float32),
    }

    def row_of(text: list[int]) -> int:
        return next(b for b in range(ROWS) if TEXTS[b, : len(text)].tolist() == text)

    def logits(text: list[int], path: tuple[int, ...]) -> np.ndarray:
        x, adapter = TARGET.hidden(text[:-1])[-1].astype(np.float64), adapters[row_of(text)]
        for layer in range(2):
            z = (
                x @ bank["kernel"][adapter, layer, len(path)]
                + bank["bias"][adapter, layer, len(path)]
            )
            x = x + z * sigmoid(z)
        return x @ TARGET.head

    params = MedusaParams(bank, np.array(adapters, np.int32), {"head": TABLE["head"]})
    return Case(
        MedusaSource(heads), params, logits, "block", 1e-4,
        reads=lambda text, _: len(text) > 1 and adapters[row_of(text)] >= 0,
    )  # fmt: skip


def datastore(kind: str) -> Case:
    """Counts of a datastore and of the own text; a row drafts where a token is probable enough."""
    rng = np.random.default_rng(5)
    # Of few tokens, and with pieces of the rows' texts, so that contexts agree in several tokens.
    # Others begin as a row's text does, one token later, so that they also agree before its start.
    texts = [*rng.integers(1, 6, (2, 25)), *(text[8:24] for text in TEXTS)]
    texts = [*(text.tolist() for text in texts), *(text[[0, *range(6)]].tolist() for text in TEXTS)]
    store, share = Datastore.build(texts, vocab_size=VOCAB).arrays(), 0.12
    places, prior = contexts(texts), np.asarray(store.prior)

    def chances(text: list[int], path: tuple[int, ...]) -> np.ndarray:
        own = [(context, token) for context, token in contexts([text]) if context]
        return mixed(places, own, (*path[::-1], *text[::-1]), prior)

    return Case(
        DatastoreSource(VOCAB, share if kind == "chain" else 0.0), store,
        lambda text, path: np.log(chances(text, path)), kind, 2e-4,
        reads=lambda text, _: kind != "chain" or chances(text, ()).max() >= share,
    )  # fmt: skip


def block_draft(correction: Correction, threshold: float = 0.0, **config: Any) -> Case:
    """Layers with a window and without, and a correction; its vocabulary may be a smaller one."""
    rng, size = np.random.default_rng(6), correction.draft_vocab_size
    config = dataclasses.replace(PLAIN.net.config, **config)
    source = BlockDraftSource(BlockDraft(config), VOCAB, PLAIN.taps, correction, threshold)
    shapes = jax.eval_shape(lambda key: initial_block(source.net, key), jax.random.key(0))
    made: dict[str, Any] = {}
    for path, shape in correction.shapes().items():
        at = made
        for name in path[:-1]:
            at = at.setdefault(name, {})
        at[path[-1]] = rng.normal(0, 0.3, shape).astype(np.float32)
    head, to_draft = TARGET.head[:, :size], rng.permutation(VOCAB)
    to_draft = np.where(to_draft < size, to_draft, -1).astype(np.int32)
    own = {"draft": drawn(shapes, 7), "correction": made, "head": {"kernel": head},
           "to_draft": to_draft}  # fmt: skip
    naive = NaiveBlock(source, own, TARGET.embedding, head)

    def features(text: list[int]) -> np.ndarray:
        return TARGET.features(text, source.taps)[:-1]

    def logits(text: list[int], path: tuple[int, ...]) -> np.ndarray:
        row = naive.logits(features(text), text, path)
        return np.where(to_draft >= 0, row[to_draft], -np.inf)

    def goes_on(text: list[int], path: tuple[int, ...]) -> bool:
        before = made["before"][(text[-1], *path)[-1]]
        inputs, last = (
            np.r_[naive.slots(features(text), text)[len(path)], before],
            made["confidence"],
        )
        return bool(sigmoid(inputs @ last["kernel"] + last["bias"])[0] >= threshold)

    params = SharedParams(own, {"embedding": TARGET.embedding})
    sure = goes_on if threshold else None
    return Case(source, params, logits, "block", 1e-4, goes_on=sure)


SIZES = (32, VOCAB, VOCAB - 6)
BLOCK_DRAFTS = {
    "rnn": lambda: block_draft(MarkovHead(*SIZES, 8, "rnn", "both"), 0.5),
    "gated": lambda: block_draft(MarkovHead(*SIZES, 8, "gated"), first_slot=0, block_size=3),
    "gru": lambda: block_draft(PrefixGRU(*SIZES, 12, 20, 1), output_scale=0.5, logit_softcap=3.0),
    "selector": lambda: block_draft(
        CandidateSelector(*SIZES, 8, 5), conv_size=2, conv_group=4, embedding_scale=2.0
    ),
}


def early_exit(kind: str) -> Case:
    """The first of two layers; the state is the cache of the target, which reads on."""
    target = transformer()
    shapes = jax.eval_shape(target.init, jax.random.key(0))
    source = EarlyExitSource(target, 1)
    params = drawn(shapes, 8)
    first = jax.jit(lambda tokens: source.model.apply(params, tokens, jnp.arange(CAPACITY)[None]))

    @functools.cache
    def rows(text: tuple[int, ...]) -> np.ndarray:
        tokens = np.zeros((1, CAPACITY), np.int32)
        tokens[0, : len(text)] = text
        return np.asarray(first(tokens).logits[0])

    return Case(
        source, params, lambda text, path: rows((*text, *path))[len(text) + len(path) - 1], kind,
        2e-5,
    )  # fmt: skip


def near_self(kind: str, window: int = CAPACITY, selected: int = 0) -> Case:
    """The target that sees the whole text; `test_near_self.py` has smaller windows."""
    target = transformer()
    params = drawn(jax.eval_shape(target.init, jax.random.key(0)), 8)
    whole = jax.jit(lambda tokens: target.apply(params, tokens, jnp.arange(CAPACITY)[None]))

    @functools.cache
    def rows(text: tuple[int, ...]) -> np.ndarray:
        tokens = np.zeros((1, CAPACITY), np.int32)
        tokens[0, : len(text)] = text
        return np.asarray(whole(tokens).logits[0])

    def cache(count: Any) -> KVCache:
        """What the target has of the texts; one that shares it has it as its state."""
        empty = target.init_cache(ROWS, CAPACITY)
        places = jnp.broadcast_to(jnp.arange(TEXTS.shape[1]), TEXTS.shape)
        staged = target.apply(params, jnp.asarray(TEXTS), places, empty).staged
        return staged.commit(jnp.asarray(count, jnp.int32))

    return Case(
        NearSelfSource(target, window, sinks=2, selected=selected, chunk=3), params,
        lambda text, path: rows((*text, *path))[len(text) + len(path) - 1], kind, 2e-5,
        cache=cache if selected else lambda count: None,
    )  # fmt: skip


CASES = {
    "near self, chain": lambda: near_self("chain"),
    "near self, tree": lambda: near_self("tree"),
    "near self, selected, chain": lambda: near_self("chain", 2, CAPACITY // 3),
    "near self, selected, tree": lambda: near_self("tree", 2, CAPACITY // 3),
    "draft, chain": lambda: table_draft(TableModel(VOCAB + 4, memory=2), "chain"),
    "draft, tree": lambda: table_draft(TableModel(VOCAB - 5, memory=3), "tree"),
    "recurrent draft": recurrent_draft,
    "translated, chain": lambda: translated("chain"),
    "translated, tree": lambda: translated("tree"),
    "early exit, chain": lambda: early_exit("chain"),
    "early exit, tree": lambda: early_exit("tree"),
    "eagle3, chain": lambda: eagle3("chain"),
    "eagle3, tree": lambda: eagle3("tree"),
    "assistant, chain": lambda: assistant("chain", window=5, clusters=VOCAB),
    "assistant, tree": lambda: assistant("tree", window=1),
    "mtp, chain": lambda: mtp("chain", zeroes_first=True),
    "mtp, tree": lambda: mtp("tree", feeds_normed=False, hidden_first=True),
    "mtp, no norm": lambda: mtp("chain", head_tokens=20, has_norm=False),
    "mtp layers, chain": lambda: mtp_layers("chain", 3, zeroes_first=True),
    "mtp layers, last reused": lambda: mtp_layers("chain", 2, feeds_normed=False),
    "mtp layers, tree": lambda: mtp_layers("tree", 2),
    "mtp layers, deep tree": lambda: mtp_layers("tree", 3, zeroes_first=True),
    "peagle": peagle,
    "medusa": medusa,
    "datastore, chain": lambda: datastore("chain"),
    "datastore, tree": lambda: datastore("tree"),
    **{f"block draft, {name}": make for name, make in BLOCK_DRAFTS.items()},
}


OF_FEATURES = [
    name
    for name in CASES
    if name.startswith(("eagle3", "assistant", "mtp", "peagle", "block draft"))
]
"""The cases of sources that read features, or keys and values, of the target."""


@functools.cache
def made(name: str) -> Case:
    return CASES[name]()


def check_along_a_text(name: str) -> None:
    """See the top of this file."""
    case = made(name)
    compared = drive(case)
    assert len(compared) > 30
    assert {len(path) for _, path in compared} == set(range(DEPTH + (case.kind == "tree")))


def check_in_parts(name: str) -> None:
    """A prompt that is read in parts is read, also if it was read further, and taken back;
    recurrent and translated drafts cannot be.  Translated ones are driven until they are full."""
    case = made(name)
    steps = STEPS if isinstance(case.source, TranslatedSource) else 2
    assert len(drive(case, in_parts(case), steps)) > 6


# --- driving a source -----------------------------------------------------------------------------


def lookaheads(case: Case) -> list[Lookahead]:
    """The argument of `init` that only the sources of a token at a time have."""
    if case.kind == "block":
        return []
    size = 1 + len(LEVELS) if case.kind == "tree" else DEPTH + 1
    return [Lookahead(DEPTH, size, case.kind == "chain")]


def in_parts(case: Case) -> Callable[[Any, Block], Any]:
    """The state after a prompt that is read three tokens at a time.

    A source that can be truncated first reads beyond the prompt, is truncated to two tokens less,
    and reads these again.  Row 1 is truncated to the prompt itself, a single token; only Medusa's
    heads need a token that is read after the truncation.
    """
    source = case.source
    read, truncate = jax.jit(source.read), jax.jit(source.truncate)

    def go_on(params: Any, state: Any, start: np.ndarray, end: np.ndarray) -> Any:
        while (start < end).any():
            width = 3
            count = np.clip(end - start, 0, width)
            at = start[:, None] + np.arange(width)
            block = block_of(case, np.take_along_axis(TEXTS, at, axis=1), count, start)
            state, start = read(params, state, block), start + count
        return state

    def begin(params: Any, prompt: Block) -> Any:
        at, zero = np.asarray(prompt.count), np.zeros(ROWS, int)
        empty = before(block_of(case, TEXTS[:, :2], zero, zero))
        state = source.init(
            params, jax.tree.map(jnp.asarray, empty), case.capacity, *lookaheads(case)
        )
        again = np.array([2, 2 if isinstance(source, MedusaSource) else 0, 2, 2])
        kept = np.maximum(at - again, 0)
        features = None
        if case.source.taps:
            seen = block_of(case, TEXTS[:, : LENGTHS.max()], kept, zero).features
            features = seen[np.arange(ROWS), np.maximum(kept - 1, 0)]
        further = go_on(params, state, zero, at + 3)
        assert jax.tree.map(jnp.shape, further) == jax.tree.map(jnp.shape, state)
        cut = truncate(further, kept, features)
        assert (cut is None) is (name_of(source) in ("recurrent", "translated"))
        if cut is None:
            return go_on(params, state, zero, at)
        return go_on(params, cut, kept, at)

    return begin


def name_of(source: Any) -> str:
    if isinstance(source, TranslatedSource):
        return "translated"
    model = getattr(source, "model", None)
    return "recurrent" if model is not None and not model.reads_trees else ""


def drive(
    case: Case, begin: Callable[..., Any] | None = None, steps: int = STEPS
) -> list[tuple[int, tuple[int, ...]]]:
    """Go along `TEXTS` with a source.  Returns the text lengths and paths that were compared.

    `begin` makes the state after a prompt, by default at once.
    """
    rng = np.random.default_rng(9)
    at_once, step, leave_out = programs(case)
    begin = at_once if begin is None else begin
    at, new = LENGTHS - 1, np.ones(ROWS, int)  # of the pending tokens, and how many are unread
    state = begin(case.params, block_of(case, TEXTS[:, : LENGTHS.max()], at, at * 0))
    compared, fresh, left = [], np.ones(ROWS, bool), set()
    for number in range(steps):
        depth = rng.integers(1, DEPTH + 1, ROWS)
        depth[0] = (3, 3, 1, 2)[number % 4]
        parent, asked, drafts = shape_of(case, rng, depth)
        tokens = rng.integers(1, VOCAB, parent.shape).astype(np.int32)
        tokens[:, 0] = TEXTS[np.arange(ROWS), at]
        count, path = np.ones(ROWS, int), np.zeros((ROWS, DEPTH + 1), np.int32)
        for row in range(ROWS):
            path[row, 1 : 1 + len(drafts[row])] = drafts[row]
            following = TEXTS[row, at[row] + 1 :]
            right = rng.integers(0, len(drafts[row]) + 1)
            while not all(case.knows(int(token)) for token in following[:right]):
                right -= 1
            tokens[row, drafts[row]] = 1 + following[: len(drafts[row])] % (VOCAB - 1)
            tokens[row, drafts[row][:right]] = following[:right]
            count[row] += right
        if number >= DONE:
            count[1] = 0
        if not isinstance(case.source, TranslatedSource):
            count = np.minimum(count, case.capacity - 1 - at)
        block = block_of(case, np.take_along_axis(tokens, path, axis=1), count, at)
        if resumes(case) and number in (2, 4, 5, 6, 7):
            state = leave_out(case.params, state, block)
            at = at + count
            continue
        state, *found = step(case.params, state, tokens, parent, depth.max(), block, path, at)
        for row in np.flatnonzero(fresh):
            mine = [None if x is None else np.asarray(x[row]) for x in found]
            compared += compare(case, row, at[row], new[row], tokens[row], asked[row], *mine)
            left.add(case.left(TEXTS[row, : at[row] + 1].tolist()))
        fresh = count > 0
        if resumes(case):
            fresh[-1] = False  # the row that is not wanted
        at, new = at + count, count + 1
    assert steps < STEPS or (at[2] > 15 and 0 in left)
    return compared


def resumes(case: Case) -> bool:
    return case.kind == "chain" and case.source.resumes


def compare(
    case: Case, row: int, at: int, new: int, tokens: Any, asked: Any, found: Any, known: Any,
    sure: Any,
) -> list[tuple[int, tuple[int, ...]]]:  # fmt: skip
    """Compare what was found after the pending token of a row and after each path below it."""
    text, compared = TEXTS[row, : at + 1].tolist(), []
    reads = case.reads(text, int(new))
    if known is not None:
        nodes = [path[-1] for path in asked]
        of_nodes = [case.knows(int(tokens[node])) for node in nodes]
        if not isinstance(case.source, TranslatedSource | PAIRED):
            of_nodes = [reads] * len(nodes)
        assert [bool(each) for each in known[[0, *nodes]]] == [reads, *of_nodes], (row, at)
    else:
        assert reads, "every node of a row is known, and none should be"
    for place, path in enumerate([(), *asked] if reads else []):
        below = tuple(int(token) for token in tokens[list(path)])
        if not all(map(case.knows, below)):
            continue
        wanted, where = case.logits(text, below), f"row {row}, {at}, {below}"
        finite = np.isfinite(wanted)
        np.testing.assert_array_equal(np.isfinite(found[place]), finite, where)
        bound = case.within * np.abs(wanted[finite]).max()
        np.testing.assert_allclose(found[place][finite], wanted[finite], 0, bound, err_msg=where)
        if sure is not None:
            assert sure[place] == case.goes_on(text, below)
        compared.append((at, below))
    return compared


Path = tuple[int, ...]


def shape_of(case: Case, rng: Any, depth: Any) -> tuple[np.ndarray, list[list[Path]], list[Any]]:
    """The parents [B, N] of a step's nodes; of each row the paths that are asked for, and the
    nodes of the path that may be accepted."""
    if case.kind != "tree":
        nodes = np.arange(DEPTH + 1)
        parent = np.where(nodes <= depth[:, None], nodes - 1, ABSENT).astype(np.int32)
        # The deepest draft is not read.
        last = depth if case.kind == "chain" else np.full(ROWS, DEPTH)
        asked = [[tuple(range(1, n)) for n in range(2, end + 1)] for end in last]
        return parent, asked, [list(range(1, n + 1)) for n in depth]
    parent = np.full((ROWS, 1 + len(LEVELS)), ABSENT, np.int32)
    parent[:, 1:4] = 0
    parent[:, 4:6] = rng.integers(1, 4, (ROWS, 2))
    parent[:, 6:] = rng.integers(4, 6, (ROWS, 2))
    asked = []
    for row in parent:
        paths: list[Path] = [()]
        for node, up in enumerate(row[1:], 1):
            paths.append((*paths[up], node))
        asked.append(paths[1:])
    return parent, asked, [list(paths[-1]) for paths in asked]


def block_of(case: Case, tokens: np.ndarray, count: np.ndarray, start: np.ndarray) -> Block:
    """What the target gives for tokens [B, T] behind the first `start` of the text; noise behind
    those that count."""
    taps = case.source.taps
    hidden = np.full((*tokens.shape, 32), NOISE, np.float32)
    features = np.full((*tokens.shape, 32 * len(taps)), NOISE, np.float32)
    for row, n in enumerate(count):
        if n:
            text, own = TEXTS[row, : start[row] + n].tolist(), slice(start[row], start[row] + n)
            assert text[own] == tokens[row, :n].tolist()
            hidden[row, :n] = TARGET.hidden(text)[own]
            features[row, :n] = TARGET.features(text, taps)[own] if taps else 0
    return Block(tokens, hidden, count.astype(np.int32), features if taps else None)


def programs(case: Case) -> tuple[Callable[..., Any], ...]:
    """Compiled once: the state after a prompt, a step, and a step without the source."""
    if id(case) not in PROGRAMS:
        PROGRAMS[id(case)] = compiled(case)
    return PROGRAMS[id(case)]


PROGRAMS: dict[int, tuple[Callable[..., Any], ...]] = {}


def compiled(case: Case) -> tuple[Callable[..., Any], ...]:
    source, size = case.source, 1 + len(LEVELS) if case.kind == "tree" else DEPTH + 1
    if isinstance(source, BlockSource):
        init = jax.jit(lambda params, block: started(source, params, block, case.capacity))
        return init, jax.jit(functools.partial(block_step, source)), None

    def init(params: Any, block: Block) -> Any:
        if not source.shares_cache:
            return started(source, params, block, case.capacity, *lookaheads(case))
        cache = source.target.init_cache(ROWS, case.capacity + size)
        places = jnp.broadcast_to(jnp.arange(block.tokens.shape[1]), block.tokens.shape)
        return source.target.apply(params, block.tokens, places, cache).cache.commit(block.count)

    def observe(params: Any, state: Any, block: Block, tokens: Any, chosen: Any, mask: Any) -> Any:
        if not source.shares_cache:
            return source.observe(params, state, block)
        if mask is None:
            places = state.length[:, None] + jnp.arange(size)
            out = source.target.apply(params, tokens, places, state)
            return out.cache.commit(block.count)
        places = state.length[:, None] + jnp.r_[0, 1 + LEVELS]
        out = source.target.apply(params, tokens, places, state, mask)
        return out.cache.commit(block.count, chosen)

    def chain(params, state, tokens, parent, depth, block, chosen, at):
        if source.resumes:
            wanted = jnp.arange(ROWS) < ROWS - 1
            text = jnp.asarray(TEXTS[:, : case.capacity])
            state = source.resume(params, state, text, jnp.asarray(at), wanted)
        state, reading, logits = source.begin(params, state, pending(tokens[:, 0], case.cache(at)))
        found = [logits]
        for draft in range(1, DEPTH):  # a chain leaves out the passes that no row needs

            def extend(reading, logits, draft=draft):
                return source.extend(params, reading, tokens[:, draft])

            reading, logits = jax.lax.cond(
                draft < depth, extend, lambda *same: same, reading, logits
            )
            found.append(logits)
        known = source.known(params, reading, tokens)
        state = source.end(params, state, reading, Proposal(tokens, parent))
        state = observe(params, state, block, tokens, chosen, None)
        return state, jnp.stack(found, axis=1), known, None

    def tree(params, state, tokens, parent, depth, block, chosen, at):
        rows = jnp.arange(ROWS)[:, None]
        mask = jnp.eye(size, dtype=bool) | jnp.zeros((ROWS, 1, 1), bool)
        for node in range(1, size):
            mask = mask.at[:, node].max(mask[rows[:, 0], parent[:, node]])
        state, reading, logits = source.begin(params, state, pending(tokens[:, 0], case.cache(at)))
        found = [logits[:, None]]
        for level in range(DEPTH):
            end = int((level >= LEVELS).sum())
            nodes = np.tile(np.flatnonzero(level == LEVELS), (ROWS, 1))
            reading, logits = source.read_tree(
                params, reading, tokens[:, 1 : 1 + end], jnp.asarray(nodes),
                jnp.asarray(LEVELS[:end]), mask[:, 1 : 1 + end, 1 : 1 + end],
            )  # fmt: skip
            found.append(logits)
        known = source.known(params, reading, tokens)
        state = source.end(params, state, reading, Proposal(tokens, parent))
        state = observe(params, state, block, tokens, chosen, mask)
        return state, jnp.concatenate(found, axis=1), known, None

    def leave_out(params, state, block):
        return source.observe(params, source.rest(state), block)

    return jax.jit(init), jax.jit(chain if case.kind == "chain" else tree), jax.jit(leave_out)


def block_step(source, params, state, tokens, parent, depth, block, chosen, at):
    """The logits of each depth, which the source corrects along two paths at a time."""
    logits, has_any, reading = source.marginals(params, state, pending(tokens[:, 0]))
    sure = None
    if source.corrects:
        found, memory, going = [], None, []
        for slot in range(source.depth):
            previous = jnp.stack([jnp.roll(tokens[:, slot], 1), tokens[:, slot]], axis=1)
            made = source.correct(params, reading, slot, previous, memory)
            memory = made.memory
            found.append(made.logits[:, 1])
            going.append(made.goes_on)
        logits = jnp.stack(found, axis=1)
        sure = None if going[0] is None else jnp.stack(going, axis=1)[:, :, 1]
    known = jnp.broadcast_to(has_any[:, None], tokens.shape)
    return source.observe(params, source.end(reading), block), logits, known, sure


def pending(tokens: Any, cache: Any = None) -> Context:
    return Context(tokens, None, None, True, False, cache)  # type: ignore[arg-type]
