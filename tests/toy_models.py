"""The models that the tests share: a target, its drafts and heads, and a decoder without a cache.

`ToyModels` makes them over one of two targets.  `TableModel` is a few operations, and its logits
are exact, so laws over it are cheap.  A transformer of two layers is what users have.  All use the
same few shapes, since compiling takes longer than anything else: `ROWS` prompts padded to `WIDTH`
tokens, or one of them, in decoders of `CAPACITY`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array
from table_model import TableModel, TokenCache, tables

from specjax import (
    LinenModel,
    Transformer,
    TransformerConfig,
    Translation,
)
from specjax.contract import Model
from specjax.methods import (
    AssistantConfig,
    Eagle3,
    Eagle3Config,
    MedusaHeads,
    MedusaParams,
    Mtp,
    MtpConfig,
    SharedParams,
    part_name,
)
from specjax.methods.gemma_assistant.network import OWNERS, Assistant
from specjax.models import AttentionSizes
from specjax.types import ModelOutput

VOCAB = 29
OTHER_VOCAB = VOCAB + 4
EOS = 22
CAPACITY = 48
WIDTH = 8
LENGTHS = np.array([5, 3, 6, 1], np.int32)
LIMITS = np.array([35, 20, CAPACITY, CAPACITY], np.int32)
PROMPTS = np.array(
    [
        [1, 2, 3, 4, 5, 0, 0, 0],
        [9, 1, 4, 0, 0, 0, 0, 0],
        [7, 8, 7, 8, 7, 8, 0, 0],
        [11, 0, 0, 0, 0, 0, 0, 0],
    ],
    np.int32,
)
ROWS = len(PROMPTS)
OWN = MedusaHeads(num_heads=3, hidden_size=32, vocab_size=VOCAB, own_heads=True)
SHARED = MedusaHeads(num_heads=2, hidden_size=32, vocab_size=VOCAB, num_layers=2)
CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0))

SEED = 46
"""Of the tables: greedy texts of the first three prompts end at their limits, the last at EOS."""

_LAYERS = TransformerConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    mlp_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
    # With 0.02 the distributions of so small a model would be almost uniform.
    init_scale=0.35,
)
EAGLE3 = Eagle3Config(
    layers=dataclasses.replace(_LAYERS, num_layers=1, mlp_size=48), num_taps=2, target_size=32
)
"""The form of a random EAGLE-3 head, which is right now and then."""

MTP = MtpConfig(EAGLE3.layers)
"""The form of a random MTP layer."""

ASSISTANT = AssistantConfig(
    dataclasses.replace(
        _LAYERS,
        num_layers=3,
        mixers=(*[AttentionSizes(2, 8)] * OWNERS, AttentionSizes(2, 8, shared=True)),
    ),
    target_size=32,
    embedding_scale=1.0,
)
"""The form of a random assistant of one layer, after the two of its target that it reads."""


def transformer(
    vocab_size: int = VOCAB, num_layers: int = 2, dtype: Any = jnp.float32
) -> LinenModel:
    """A transformer of two layers."""
    config = dataclasses.replace(_LAYERS, vocab_size=vocab_size, num_layers=num_layers)
    return LinenModel(Transformer(config), dtype)


def keys(rows: int = ROWS, seed: int = 3) -> Array:
    return jax.random.split(jax.random.key(seed), rows)


def committed(cache: Any, row: int) -> list[np.ndarray]:
    """All that a cache holds of a row, up to its length: keys and values of every layer, or tokens
    and positions."""
    length = int(cache.length[row])
    if isinstance(cache, TokenCache):
        return [np.asarray(leaf)[row, :length] for leaf in (cache.tokens, cache.positions)]
    return [np.asarray(leaf)[row, :, :length] for leaf in (*cache.keys, *cache.values)]


def translation() -> Translation:
    """A hand-made translation to another vocabulary of `OTHER_VOCAB` tokens.

    Most tokens have another id there. Two tokens are spelt in the same three pieces, one in two
    unshared pieces, one in two of which one is a shared token, one as a token that stands for
    another, and two cannot be spelt.
    """
    to_draft = np.random.default_rng(6).permutation(OTHER_VOCAB)[:VOCAB].astype(np.int32)
    letters = sorted(set(range(OTHER_VOCAB)) - set(to_draft.tolist()))
    pieces, count = np.zeros((VOCAB, 3), np.int32), np.ones(VOCAB, np.int32)
    pieces[:, 0] = to_draft
    spelt = {
        3: letters[:3],
        8: letters[:3],
        14: letters[2:4],
        19: [letters[0], to_draft[5]],
        25: [to_draft[5]],
    }
    for token, spelling in {**spelt, 2: [], 11: []}.items():
        count[token], to_draft[token] = len(spelling), -1
        pieces[token, : len(spelling)] = spelling
    return Translation(
        *map(jnp.asarray, (pieces, count, to_draft, np.array(letters[:1], np.int32)))
    )


@functools.partial(jax.jit, static_argnums=0)
def _read(net: Model, arrays: Any, tokens: Array) -> ModelOutput:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return net.apply(arrays, tokens, positions)


@dataclasses.dataclass(frozen=True)
class ToyModels:
    """A target, and what drafts for it."""

    tabular: bool  # a `TableModel`, or else a transformer

    VOCAB, OTHER_VOCAB, EOS, CAPACITY, WIDTH = VOCAB, OTHER_VOCAB, EOS, CAPACITY, WIDTH
    LENGTHS, LIMITS, PROMPTS, ROWS = LENGTHS, LIMITS, PROMPTS, ROWS
    OWN, SHARED, CHOICES, EAGLE3 = OWN, SHARED, CHOICES, EAGLE3

    keys = staticmethod(keys)
    committed = staticmethod(committed)
    translation = staticmethod(translation)

    def model(self, vocab_size: int = VOCAB, num_layers: int = 2, dtype: Any = jnp.float32) -> Any:
        """The target; a draft has one layer, which is a shorter memory for a table."""
        if self.tabular:
            return TableModel(vocab_size, memory=3 if num_layers == 2 else 1)
        return transformer(vocab_size, num_layers, dtype)

    @functools.cache
    def weights(self, vocab_size: int = VOCAB, num_layers: int = 2, noise: float = 0.0) -> Any:
        """Parameters of `model`; `noise` makes a copy that agrees often, but not always."""
        if self.tabular:
            return tables(vocab_size, SEED, noise)
        params = self.model(vocab_size, num_layers).init(jax.random.key(0))
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        noisy = [
            x + noise * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)
        ]
        return jax.tree.unflatten(structure, noisy)

    @functools.cache
    def flat(
        self, vocab_size: int, noise: float = 0.0, keep: int | None = None, layers: int = 1
    ) -> Any:
        """Parameters with a flatter head, so that every text is likely enough, cut to `keep`."""
        params = self.weights(vocab_size, layers, noise)
        head = {"kernel": 0.4 * params["head"]["kernel"][:, :keep]}
        return {**params, "embedding": params["embedding"][:keep], "head": head}

    def truncated(self) -> Any:
        """The target without its last layer, a draft for `self.model(num_layers=1)`."""
        return {name: leaf for name, leaf in self.weights().items() if name != "layer_1"}

    def revocabulated(self, vocab_size: int) -> Any:
        """`truncated`, cut or padded to another vocabulary; added tokens would be favourites."""
        params = self.truncated()
        extra = max(vocab_size - VOCAB, 0)
        embedding = jnp.pad(params["embedding"], ((0, extra), (0, 0)))[:vocab_size]
        head = jnp.pad(params["head"]["kernel"], ((0, 0), (0, extra)), constant_values=3.0)[
            :, :vocab_size
        ]
        return {**params, "embedding": embedding, "head": {"kernel": head}}

    def eagle3_params(self, params: Any) -> SharedParams:
        """Random parameters of `EAGLE3`, with the embedding and the head of a target's `params`."""
        inputs = (jnp.zeros((1, 1, 64)), jnp.zeros((1, 1, 32)), jnp.zeros((1, 1), jnp.int32))
        init = functools.partial(Eagle3(EAGLE3).init, method="everything")
        made = jax.jit(init)(jax.random.key(5), *inputs)  # one program, not one per operation
        own = {"network": nn.meta.unbox(made)["params"]}
        return SharedParams(own, {name: params[name] for name in ("embedding", "head")})

    def mtp_params(self, params: Any) -> SharedParams:
        """Random parameters of `MTP`, as `eagle3_params`."""
        pair = jnp.zeros((1, 1, 32))
        made = jax.jit(Mtp(MTP).init)(jax.random.key(6), pair, pair, jnp.zeros((1, 1), jnp.int32))
        own = {"network": nn.meta.unbox(made)["params"]}
        return SharedParams(own, {name: params[name] for name in ("embedding", "head")})

    def mtp_layers_params(self, params: Any) -> SharedParams:
        """Those of two MTP layers that differ."""
        one = self.mtp_params(params)
        first = one.own["network"]
        second = jax.tree.map(lambda x: jnp.roll(x, 1, axis=-1), first)
        return one.replace(own={"network": {part_name(0): first, part_name(1): second}})

    def assistant_params(self, params: Any) -> SharedParams:
        """Random parameters of `ASSISTANT`, whose table is the target's."""
        pair, positions = jnp.zeros((1, 1, 32)), jnp.zeros((1, 1), jnp.int32)
        memories = [(jnp.zeros((1, 2, 1, 8)),) * 2] * OWNERS
        given = pair, pair, positions, memories, [jnp.ones((1, 1, 1), bool)] * OWNERS
        made = jax.jit(Assistant(ASSISTANT).init)(jax.random.key(7), *given)
        own = {"network": nn.meta.unbox(made)["params"], "table": params["embedding"]}
        return SharedParams(own, {"embedding": params["embedding"]})

    def respelt(self, params: Any, tables: Translation) -> Any:
        """Parameters in which token v is called `tables.to_draft[v]`; added tokens would be
        favourites."""
        names = np.asarray(tables.to_draft)
        shared = names >= 0
        embedding = 0.5 * jax.random.normal(
            jax.random.key(2), (OTHER_VOCAB, params["embedding"].shape[1])
        )
        if self.tabular:
            embedding = jnp.round(4 * embedding)
        head = jnp.full(
            (params["embedding"].shape[1], OTHER_VOCAB), 0.3 if not self.tabular else 0.0
        )
        return {
            **params,
            "embedding": embedding.at[names[shared]].set(params["embedding"][shared]),
            "head": {"kernel": head.at[:, names[shared]].set(params["head"]["kernel"][:, shared])},
        }

    def plain_output(
        self, tokens: Any, net: LinenModel | None = None, arrays: Any = None
    ) -> ModelOutput:
        """Read tokens [B, T] in one pass without a cache."""
        return _read(
            net or self.model(), self.weights() if arrays is None else arrays, jnp.asarray(tokens)
        )

    def plain_logits(
        self, tokens: Any, net: LinenModel | None = None, arrays: Any = None
    ) -> np.ndarray:
        """Logits [B, T, V] of tokens [B, T], by one pass without a cache."""
        return np.asarray(self.plain_output(tokens, net, arrays).logits)

    def naive_greedy(
        self,
        prompts: Any,
        lengths: Any,
        limits: Any,
        eos: tuple[int, ...] = (EOS,),
        read: Any = None,
        process: Any = None,
    ) -> list[list[int]]:
        """Greedy decoding without a cache: the whole text is read again for every token.

        `process(row, text, logits [V])` stands for logits processors.
        """
        read = read or self.plain_logits
        tokens = np.zeros((len(prompts), CAPACITY), np.int32)
        tokens[:, : prompts.shape[1]] = prompts
        length, done = np.array(lengths), np.array(lengths) >= limits
        while not done.all():
            logits = read(tokens)
            for b in np.flatnonzero(~done):
                following = logits[b, length[b] - 1]
                if process is not None:
                    following = process(b, tokens[b, : length[b]].tolist(), following)
                tokens[b, length[b]] = following.argmax()
                length[b] += 1
                done[b] = tokens[b, length[b] - 1] in eos or length[b] >= limits[b]
        return [row[:end].tolist() for row, end in zip(tokens, length, strict=True)]

    @functools.cache
    def greedy_texts(self) -> np.ndarray:
        """[16, CAPACITY] tokens that the target wrote after random prompts."""
        prompts = np.random.default_rng(0).integers(1, VOCAB, (4, ROWS, WIDTH))
        full = np.full(ROWS, WIDTH), np.full(ROWS, CAPACITY)
        return np.concatenate([self.naive_greedy(some, *full, eos=()) for some in prompts])

    def noisy_heads(
        self, heads: MedusaHeads, seed: int, scale: float = 0.2
    ) -> dict[str, np.ndarray]:
        """Random parameters; own linear maps are fitted to `greedy_texts`, so that they are right
        now and then."""
        rng = np.random.default_rng(seed)
        stack, size = (heads.num_layers, heads.num_heads), heads.hidden_size
        params = {
            "kernel": rng.normal(0, scale, (*stack, size, size)).astype(np.float32),
            "bias": rng.normal(0, scale, (*stack, size)).astype(np.float32),
        }
        if heads.own_heads:
            texts = self.greedy_texts()
            hidden = np.concatenate(
                [self.plain_output(some).hidden for some in np.split(texts, len(texts) // ROWS)]
            )
            maps = []
            for k in range(heads.num_heads):
                x, label = hidden[:, : -2 - k].reshape(-1, size), texts[:, 2 + k :].reshape(-1)
                z = x @ params["kernel"][0, k] + params["bias"][0, k]
                maps.append(
                    8
                    * np.linalg.lstsq(x + z / (1 + np.exp(-z)), np.eye(VOCAB)[label], rcond=None)[0]
                )
            params["head"] = np.array(maps, np.float32)
        return params

    @functools.cache
    def medusa_params(self, own: bool) -> MedusaParams:
        """A bank of one adapter with own linear maps, or of three with the target's, the last one
        free."""
        if own:
            bank = [self.noisy_heads(OWN, 0)]
        else:
            bank = [self.noisy_heads(SHARED, 1), self.noisy_heads(SHARED, 2)]
            bank.append(jax.tree.map(np.zeros_like, bank[0]))
        stacked = jax.tree.map(lambda *leaves: jnp.array(np.stack(leaves)), *bank)
        return MedusaParams(
            stacked, jnp.int32(0), None if own else {"head": self.weights()["head"]}
        )
