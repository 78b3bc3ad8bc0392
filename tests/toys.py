"""Tiny models, ragged prompts, a case for every proposer, and a decoder without a cache: what the law tests share.

Compilation dominates these tests, so that they all use the same few shapes: `ROWS` prompts padded to `WIDTH` tokens,
or one of them, in decoders of `CAPACITY`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax import (
    RULES,
    Decoder,
    DraftModel,
    LinenModel,
    NGram,
    NoProposer,
    Params,
    Proposal,
    Sampling,
    Transformer,
    TransformerConfig,
    tree,
)
from specjax.types import Block, DecodeState, Proposer

VOCAB = 29
EOS = 22
CAPACITY = 48
WIDTH = 8
LENGTHS = np.array([5, 3, 6, 1], np.int32)
LIMITS = np.array([35, 20, CAPACITY, CAPACITY], np.int32)
PROMPTS = np.array(
    [[1, 2, 3, 4, 5, 0, 0, 0], [9, 1, 4, 0, 0, 0, 0, 0], [7, 8, 7, 8, 7, 8, 0, 0], [11, 0, 0, 0, 0, 0, 0, 0]], np.int32
)
ROWS = len(PROMPTS)


def model(vocab_size: int = VOCAB, num_layers: int = 2, dtype: Any = jnp.float32) -> LinenModel:
    config = TransformerConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        mlp_size=64,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=64,
        # At 0.02 the distributions of so small a model are all but uniform.
        init_scale=0.35,
    )
    return LinenModel(Transformer(config), dtype)


@functools.cache
def weights(vocab_size: int = VOCAB, num_layers: int = 2, noise: float = 0.0) -> Any:
    """Parameters of `model`; with `noise` a copy that agrees often, but not always."""
    params = model(vocab_size, num_layers).init(jax.random.key(0))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + noise * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noisy)


def truncated() -> Any:
    """The target without its last layer, a draft for `model(num_layers=1)`."""
    return {name: leaf for name, leaf in weights().items() if name != "layer_1"}


def revocabulated(vocab_size: int) -> Any:
    """That, cut or padded to another vocabulary; whatever is added would be a favourite."""
    params = truncated()
    extra = max(vocab_size - VOCAB, 0)
    embedding = jnp.pad(params["embedding"], ((0, extra), (0, 0)))[:vocab_size]
    head = jnp.pad(params["head"]["kernel"], ((0, 0), (0, extra)), constant_values=3.0)[:, :vocab_size]
    return {**params, "embedding": embedding, "head": {"kernel": head}}


def ancestors(parent: Any, node: int) -> list[int]:
    """The path from the root of its tree to `node`, found by walking up."""
    found = [node]
    while parent[found[0]] >= 0:
        found.insert(0, int(parent[found[0]]))
    return found


@struct.dataclass
class TreeState:
    tokens: Array  # [B, capacity]
    length: Array  # [B]


@dataclasses.dataclass(frozen=True)
class SampledTree:
    """Trees for the decoder's general path: rows take turns through `shapes`, so parents are data.

    `model` rereads the whole text for every node: slow, and without a cache of its own.  Siblings are drawn without
    replacement, as the tokens of greatest logit + noise.
    """

    model: LinenModel
    shapes: tuple[tuple[int, ...], ...]
    is_chain = False

    @property
    def num_nodes(self) -> int:
        return len(self.shapes[0])

    @property
    def max_depth(self) -> int:
        return max(len(ancestors(shape, n)) - 1 for shape in self.shapes for n in range(len(shape)))

    def init(self, params: Any, prompt: Block, capacity: int) -> TreeState:
        rows, width = prompt.tokens.shape
        tokens = jnp.zeros((rows, capacity + self.num_nodes), jnp.int32).at[:, :width].set(prompt.tokens)
        return TreeState(tokens, prompt.count)

    def observe(self, params: Any, state: TreeState, block: Block) -> TreeState:
        write = jax.vmap(lambda text, new, at: jax.lax.dynamic_update_slice(text, new, (at,)))
        return TreeState(write(state.tokens, block.tokens, state.length), state.length + block.count)

    def propose(self, params: Any, state: TreeState, pending: Array, draw: Any, warp: Any):
        rows, width, nodes = len(pending), state.tokens.shape[1], self.num_nodes
        parent = jnp.array(self.shapes)[state.length % len(self.shapes)]
        depth, mask = jax.vmap(tree.depth)(parent), jax.vmap(tree.ancestor_mask)(parent)
        slot = jnp.arange(width)
        text = jnp.broadcast_to(slot[:, None] >= slot, (rows, width, width))
        past = jnp.broadcast_to((slot < state.length[:, None])[:, None], (rows, nodes, width))
        visible = jnp.concatenate(
            [jnp.pad(text, ((0, 0), (0, 0), (0, nodes))), jnp.concatenate([past, mask], axis=2)], axis=1
        )
        positions = jnp.concatenate([jnp.broadcast_to(slot, (rows, width)), state.length[:, None] + depth], axis=1)

        def read(tokens):
            everything = jnp.concatenate([state.tokens, tokens], axis=1)
            logits = self.model.apply(params, everything, positions, None, visible).logits[:, width:]
            # Under shared noise guesses need no distribution, and at temperature 0 a warped one has no second best.
            return logits.astype(jnp.float32) if draw.shared else warp(logits)

        def one(n, tokens):
            up = parent[:, n]
            at = jnp.maximum(up, 0)
            scores = jnp.take_along_axis(read(tokens), at[:, None, None], axis=1)[:, 0]
            noise = jax.vmap(lambda d, node, deep: d.noise(node, deep))(
                draw, at, jnp.take_along_axis(depth, at[:, None], axis=1)[:, 0]
            )
            sibling = (parent == up[:, None]) & (jnp.arange(nodes) < n)
            taken = (sibling[:, :, None] & (tokens[:, :, None] == jnp.arange(scores.shape[-1]))).any(1)
            # A float that is lower than any score and yet above -inf: a sibling is distinct even where nothing is left.
            found = jnp.argmax(jnp.where(taken, -jnp.inf, jnp.maximum(scores + noise, -1e30)), axis=-1)
            return tokens.at[:, n].set(found.astype(jnp.int32))

        tokens = jnp.zeros((rows, nodes), jnp.int32).at[:, 0].set(pending)
        tokens = jax.lax.fori_loop(1, nodes, one, tokens)
        return Proposal(tokens, parent, None if draw.shared else read(tokens)), state


NOISE = 0.03
SHAPES = ((-1, 0, 0, 1, 1, 2, 3), (-1, 0, 1, 2, 0, 4, 0), (-1, 0, -1, 1, 0, 4, 4))
"""Breadth first, depth first, and one with an absent node."""

TABLE: dict[str, dict[str, tuple[Proposer, Any]]] = {
    "none": {"none": (NoProposer(), None), "none padded": (NoProposer(num_nodes=4), None)},
    "draft": {
        "draft 1": (DraftModel(model(), VOCAB, 1), weights(noise=NOISE)),
        "draft 3": (DraftModel(model(), VOCAB, 3), weights(noise=NOISE)),
        "draft 6": (DraftModel(model(num_layers=1), VOCAB, 6), truncated()),
    },
    "ngram": {"ngram": (NGram(num_drafts=3), None)},
}
"""Cases of every proposer in `specjax.PROPOSERS`, by its name there."""

CASES: dict[str, tuple[Proposer, Any]] = {
    **{name: case for cases in TABLE.values() for name, case in cases.items()},
    "tree": (SampledTree(model(), SHAPES), weights(noise=NOISE)),
}
"""Those, and a tree, since the shipped proposers make chains only."""

PAIRS = [(case, rule) for case in CASES for rule in RULES]

ALONE = [(case, rule) for case in ("none", "draft 3", "ngram", "tree") for rule in RULES]
"""Pairs that are also compiled for a single row: each proposer once."""


def decoder(case: str, rule: str, eos: tuple[int, ...] = (EOS,), capacity: int = CAPACITY) -> Decoder:
    return Decoder(model(), CASES[case][0], RULES[rule](), eos, capacity)


def params(case: str) -> Params:
    return Params(weights(), CASES[case][1])


def keys(rows: int = ROWS, seed: int = 3) -> Array:
    return jax.random.split(jax.random.key(seed), rows)


def prefill(dec: Decoder, arrays: Params, rows: Any = None, temperature: Any = 0.0, **changes: Any) -> DecodeState:
    """The prompts, or those of `rows`; `changes` replace what else `Decoder.prefill` takes, or settings."""
    settings = {name: changes.pop(name) for name in ("top_k", "top_p", "min_p") if name in changes}
    fields = {"prompt": PROMPTS, "prompt_length": LENGTHS, "limit": LIMITS, "key": keys()} | changes
    if rows is not None:
        fields = {name: value[np.array(rows)] for name, value in fields.items()}
    fields = {name: jnp.array(value) for name, value in fields.items()}  # a copy: `run` donates what it is given
    sampling = Sampling.create(len(fields["prompt"]), temperature, **settings)
    return dec.prefill(arrays, fields.pop("prompt"), fields.pop("prompt_length"), sampling=sampling, **fields)


def texts(state: DecodeState) -> list[list[int]]:
    """Prompt and output of every row."""
    tokens, length = np.asarray(state.tokens), np.asarray(state.length)
    return [row[:end].tolist() for row, end in zip(tokens, length, strict=True)]


@functools.cache
def decoded(case: str, rule: str, temperature: float = 0.0) -> tuple[list[list[int]], DecodeState]:
    """The texts and the last state of a whole run over the prompts.  Do not pass the state to `run`: it is shared."""
    dec = decoder(case, rule)
    state = dec.run(params(case), prefill(dec, params(case), temperature=temperature))
    return texts(state), jax.device_get(state.replace(key=None))


def committed(cache: Any, row: int) -> list[np.ndarray]:
    """Every layer's keys and values of a row, up to its length."""
    return [np.asarray(leaf[row, :, : int(cache.length[row])]) for leaf in (*cache.keys, *cache.values)]


@functools.partial(jax.jit, static_argnums=0)
def _read(net: LinenModel, arrays: Any, tokens: Array) -> Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return net.apply(arrays, tokens, positions).logits


def plain_logits(tokens: Any, net: LinenModel | None = None, arrays: Any = None) -> np.ndarray:
    """[B, T] -> [B, T, V] by one pass without a cache."""
    return np.asarray(_read(net or model(), weights() if arrays is None else arrays, jnp.asarray(tokens)))


def naive_greedy(prompts: Any, lengths: Any, limits: Any, eos: tuple[int, ...] = (EOS,)) -> list[list[int]]:
    """Greedy decoding without a cache: the whole text is read again for every token."""
    tokens = np.zeros((len(prompts), CAPACITY), np.int32)
    tokens[:, : prompts.shape[1]] = prompts
    length, done = np.array(lengths), np.array(lengths) >= limits
    while not done.all():
        following = plain_logits(tokens).argmax(-1)
        for b in np.flatnonzero(~done):
            tokens[b, length[b]] = following[b, length[b] - 1]
            length[b] += 1
            done[b] = tokens[b, length[b] - 1] in eos or length[b] >= limits[b]
    return [row[:end].tolist() for row, end in zip(tokens, length, strict=True)]
