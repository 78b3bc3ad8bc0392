"""The cases that `tests/on_meshes.py` decodes on eight devices: families, and every proposer for
each."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import published_cases
from jax.sharding import Mesh

import specjax
from specjax.contract import Proposer
from specjax.decoding.decoder import Decoder
from specjax.methods import (
    DatastoreParams,
    DraftSource,
    EarlyExitSource,
    MedusaParams,
    NearSelfSource,
    PublishedDrafter,
    TranslatedParams,
    TranslatedSource,
)
from specjax.methods.medusa.network import MedusaHeads
from specjax.models import Rope, Router
from specjax.models.mixers import GatedDelta, Latent
from specjax.parallel import make_mesh, replicate, shard_params
from specjax.proposers import Shape
from specjax.types import DecodeState, Params

LATENT = Latent(kv_rank=96, nope_dim=16, rope_dim=16, value_dim=16, q_rank=96)
VOCAB, OTHER_VOCAB, ROWS, WIDTH, CAPACITY = 32, 36, 8, 8, 256
LENGTHS = np.array([5, 3, 6, 1, 8, 2, 7, 4], np.int32)
PROMPTS = np.random.default_rng(0).integers(1, VOCAB, (ROWS, WIDTH)).astype(np.int32)
LIMITS = LENGTHS + np.array([24, 18, 9, 20, 1, 0, 22, 16], np.int32)

MESHES: tuple[tuple[int, ...], ...] = ((1, 8), (2, 4), (4, 2), (8, 1))
"""Devices along `data` and `model`; a third number is that along `kv_copies`."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_kv_heads": 4},
    "mixtral": {"num_kv_heads": 2, "num_experts": 4, "experts_per_token": 2, "expert_size": 256},
    "gpt_oss": {
        "num_kv_heads": 4, "num_experts": 8, "experts_per_token": 2, "expert_size": 128,
        "sinks": True, "windows": (6, None), "expert_bias": True, "gate_limit": 7.0,
        "normalise_experts": False, "router": Router(of_chosen=True, bias=True),
    },
    "glm4_moe": {
        "num_kv_heads": 4, "num_experts": 8, "experts_per_token": 2, "expert_size": 128,
        "shared_size": 128, "shared_gate": True,
        "router": Router("sigmoid", corrected=True, groups=4, kept_groups=2),
    },
    "gemma2": {
        "num_kv_heads": 4, "windows": (6, None), "attention_softcap": 5.0, "logit_softcap": 8.0,
        "norm_offset": 1.0, "norm_order": "sandwich", "embedding_scale": 8.0,
        "tied_embeddings": True, "activation": "gelu_tanh",
    },
    "olmo2": {"num_kv_heads": 4, "norm_order": "post", "qk_norm": "whole"},
    "opt": {
        "rope": None, "position_offset": 2, "tied_embeddings": True, "norm": "layer",
        "qkv_bias": True, "out_bias": True, "activation": "relu", "gated": False, "mlp_bias": True,
    },
    "qwen3_5": {
        "num_kv_heads": 4, "output_gate": True, "qk_norm": "head", "norm_offset": 1.0,
        "mixers": (GatedDelta(8, 16, 32, 32), None),
    },
    "gpt_neox": {
        "rope": Rope(fraction=0.5), "norm": "layer", "norm_order": "parallel", "qkv_bias": True,
        "out_bias": True, "activation": "gelu", "gated": False, "mlp_bias": True,
    },
    "deepseek_v3": {
        "mixers": (LATENT, LATENT), "interleaved": True, "num_experts": 8, "experts_per_token": 2,
        "expert_size": 256, "shared_size": 256, "sparse": (False, True),
        "router": Router("sigmoid", corrected=True, groups=2, scale=1.5),
    },
}  # fmt: skip
"""One family per kind: grouped keys, experts, windows and soft caps, norms over all heads,
learned positions, parallel branches, latent attention. Families with fewer key heads than devices
keep them whole on a device."""


def mesh_of(data: int, model: int, kv_copies: int = 1) -> Mesh:
    devices = jax.devices()[: data * model * kv_copies]
    return make_mesh(data, model, devices, kv_copies=kv_copies)


def transformer(num_kv_heads: int = 8, **switches: Any) -> specjax.LinenModel:
    config = specjax.TransformerConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        mlp_size=128,
        num_layers=1,
        num_heads=8,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        max_positions=CAPACITY,
        init_scale=0.35,
    )
    return specjax.LinenModel(specjax.Transformer(dataclasses.replace(config, **switches)))


def noisy(params: Any, noise: float = 0.03, seed: int = 1) -> Any:
    """A copy that often, but not always, agrees."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    new = [x + noise * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, new)


@dataclasses.dataclass
class Case:
    """A decoder, its arrays on one device, and the meshes to try it on."""

    decoder: Decoder
    params: Params
    meshes: tuple[tuple[int, ...], ...] = MESHES
    split_draft: bool = True
    temperature: float = 1.0
    drafter: PublishedDrafter | None = None

    def on(self, mesh: Any) -> Params:
        """The arrays on a mesh, laid out as `specjax.load` and `pair` do it."""
        target = shard_params(self.decoder.target, self.params.target, mesh)
        if self.drafter is not None:
            model = specjax.LanguageModel(self.decoder.target, target)
            return Params(target, self.drafter.arrays(model, ROWS))

        def place(proposer, params):
            if isinstance(proposer, specjax.FirstOf):
                return place(proposer.first, params[0]), place(proposer.second, params[1])
            source = proposer.source if isinstance(proposer, Shape) else None
            if isinstance(source, EarlyExitSource | NearSelfSource):
                return target
            if isinstance(source, TranslatedSource):
                return TranslatedParams(
                    shard_params(source.model, params.model, mesh),
                    replicate(params.translation, mesh),
                )
            if isinstance(source, DraftSource) and self.split_draft:
                return shard_params(source.model, params, mesh)
            return replicate(params, mesh)

        return Params(target, place(self.decoder.proposer, self.params.proposer))

    def prefill(self, params: Params) -> DecodeState:
        sampling = specjax.Sampling.create(ROWS, temperature=[self.temperature, 0] * (ROWS // 2))
        keys = jax.random.split(jax.random.key(3), ROWS)
        # All rules without numbers share one prefill program.
        without_numbers = jax.tree_util.all_leaves([self.decoder.rule])
        rule = specjax.Match() if without_numbers else self.decoder.rule
        decoder = dataclasses.replace(self.decoder, rule=rule)
        return decoder.prefill(params, PROMPTS, LENGTHS, limit=LIMITS, sampling=sampling, key=keys)


def proposers(target: specjax.LinenModel, weights: Any) -> dict[str, tuple[Proposer, Any]]:
    """One proposer of every kind with its parameters, drafting two tokens deep."""
    config = target.module.config
    draft = specjax.LinenModel(specjax.Transformer(config.truncated(1)))
    # The target without its last layer is a draft that is accepted now and then.
    small = noisy({name: leaf for name, leaf in weights.items() if name != "layer_1"}, 0.01)
    other = specjax.LinenModel(
        specjax.Transformer(dataclasses.replace(config.truncated(1), vocab_size=OTHER_VOCAB))
    )
    return {
        "none": (specjax.NoProposer(), None),
        "draft": (specjax.DraftModel(draft, VOCAB, 2), small),
        "tree": (specjax.DraftTree(draft, VOCAB, (2, 1)), small),
        "dynamic-tree": (specjax.DynamicTree(DraftSource(draft, VOCAB), 2, 2, 5), small),
        **({} if config.mixers else {"early-exit": (specjax.EarlyExit(target, 1, 2), weights)}),
        "first-of": (
            specjax.FirstOf(specjax.NGram(2), specjax.DraftModel(draft, VOCAB, 2)),
            (None, small),
        ),
        "medusa": medusa(config, weights),
        "ngram": (specjax.NGram(2), None),
        "datastore": (specjax.DatastoreLookup(VOCAB, 2), datastore()),
        "universal": (
            specjax.Universal(other, VOCAB, 2),
            TranslatedParams(respelt(small), translation()),
        ),
    }


def datastore() -> DatastoreParams:
    """A datastore of random texts: few of its drafts are accepted."""
    texts = np.random.default_rng(6).integers(0, VOCAB, (8, 60)).tolist()
    return specjax.Datastore.build(texts, vocab_size=VOCAB).arrays()


def medusa(config: specjax.TransformerConfig, weights: Any) -> tuple[Proposer, MedusaParams]:
    size = config.hidden_size
    heads = MedusaHeads(
        num_heads=2, hidden_size=size, vocab_size=VOCAB, logit_softcap=config.logit_softcap
    )
    bank = {
        "kernel": jnp.asarray(
            np.random.default_rng(5).normal(0, 0.2, (1, 1, 2, size, size)), jnp.float32
        ),
        "bias": jnp.zeros((1, 1, 2, size), jnp.float32),
    }
    output = "embedding" if config.tied_embeddings else "head"
    arrays = MedusaParams(bank, jnp.int32(0), {output: weights[output]})
    return specjax.Medusa(heads, ((0,), (1,), (0, 0))), arrays


def translation() -> specjax.Translation:
    """Every token has another id; one is spelt in two pieces, and one cannot be spelt."""
    to_draft = np.arange(VOCAB, dtype=np.int32)[::-1] + 2
    pieces, count = np.stack([to_draft, np.zeros_like(to_draft)], axis=1), np.ones(VOCAB, np.int32)
    pieces[3], count[3], count[8] = (0, 1), 2, 0
    to_draft[[3, 8]] = -1
    return specjax.Translation(
        *map(jnp.asarray, (pieces, count, to_draft, np.array([0], np.int32)))
    )


def respelt(params: Any) -> Any:
    """Parameters for the draft's token ids of `translation`."""
    names = np.asarray(translation().to_draft)
    shared = names >= 0
    size = params["embedding"].shape[1]
    embedding = 0.35 * jax.random.normal(jax.random.key(2), (OTHER_VOCAB, size))
    renamed = {**params, "embedding": embedding.at[names[shared]].set(params["embedding"][shared])}
    if "head" in params:
        head = (
            jnp.zeros((size, OTHER_VOCAB))
            .at[:, names[shared]]
            .set(params["head"]["kernel"][:, shared])
        )
        renamed["head"] = {"kernel": head}
    return renamed


def family_cases(family: str, only: tuple[str, ...] = ()) -> dict[str, Case]:
    """The cases of one family, by the name of the proposer."""
    # Wide enough that a matrix is larger than everything that a step has to send for its 8 rows.
    wide = {"hidden_size": 128, "mlp_size": 256, "head_dim": 16, "num_layers": 2}
    target = transformer(**{**wide, **FAMILIES[family]})
    weights = noisy(
        target.init(jax.random.key(0)), 0.05, 2
    )  # biases and norms that are not 0 and 1
    return {
        name: Case(decoder(target, proposer), Params(weights, arrays))
        for name, (proposer, arrays) in proposers(target, weights).items()
        if not only or name in only
    }


def published(meshes: Mapping[str, tuple[tuple[int, ...], ...]], kv_heads: int) -> dict[str, Case]:
    """Cases of published drafters, on the meshes that are named for each."""
    model = transformer(num_kv_heads=4, num_layers=2)
    weights = model.init(jax.random.key(0))
    target = specjax.LanguageModel(model, weights)
    cases = {}
    for name, drafter in published_cases.drafters(target, kv_heads).items():
        if name in meshes:
            made = decoder(model, drafter.proposer)
            params = Params(weights, drafter.arrays(target, ROWS))
            cases[name] = Case(made, params, meshes[name], drafter=drafter)
    return cases


def decoder(target: specjax.LinenModel, proposer: Proposer, rule: Any = None) -> Decoder:
    return Decoder(target, proposer, rule or specjax.Match(), (), CAPACITY)


def representative() -> dict[str, Case]:
    """The cases that every change is tested with: each kind of layout once."""
    plain = transformer()
    weights = plain.init(jax.random.key(0))
    drafted = specjax.DraftModel(plain, VOCAB, 2)
    grouped = transformer(num_kv_heads=2)
    grouped_weights = grouped.init(jax.random.key(0))
    experts = transformer(num_experts=4, experts_per_token=2, expert_size=128)
    windowed = transformer(windows=(6,))
    latent = transformer(mixers=(LATENT,), head_dim=16)
    latent_weights = latent.init(jax.random.key(0))
    odd = transformer(vocab_size=VOCAB + 3)
    odd_weights = odd.init(jax.random.key(0))
    heads, arrays = medusa(plain.module.config, weights)
    near = NearSelfSource(grouped, 3, sinks=1, selected=2, chunk=2)
    return {
        "draft, match": Case(decoder(plain, drafted), Params(weights, noisy(weights))),
        "whole draft, rejection": Case(
            decoder(plain, drafted, specjax.Rejection()),
            Params(weights, noisy(weights)),
            ((2, 4),),
            False,
        ),
        "draft tree, two heads": Case(
            decoder(grouped, specjax.DraftTree(grouped, VOCAB, (2, 1))),
            Params(grouped_weights, noisy(grouped_weights)),
            ((2, 4),),
        ),
        "draft, copied heads": Case(
            decoder(grouped, specjax.DraftModel(grouped, VOCAB, 2)),
            Params(grouped_weights, noisy(grouped_weights)),
            ((1, 2, 4), (2, 2, 2)),
        ),
        "draft, rows of a vocabulary that no mesh divides": Case(
            decoder(odd, specjax.DraftModel(odd, VOCAB + 3, 2)),
            Params(odd_weights, noisy(odd_weights)),
            ((1, 8), (2, 4)),
        ),
        "medusa tree": Case(decoder(plain, heads), Params(weights, arrays), ((4, 2),)),
        "near self, selected": Case(
            decoder(grouped, specjax.Chain(near, 2)),
            Params(grouped_weights, grouped_weights),
            ((2, 4), (1, 2)),
        ),
        "experts, ngram": Case(
            decoder(experts, specjax.NGram(1)),
            Params(experts.init(jax.random.key(0))),
            ((2, 4),),
            True,
            0.0,
        ),
        "latent attention, draft tree": Case(
            decoder(latent, specjax.DraftTree(latent, VOCAB, (2, 1))),
            Params(latent_weights, noisy(latent_weights)),
            ((1, 4), (2, 4)),
        ),
        "window, ngram": Case(
            decoder(windowed, specjax.NGram(3)),
            Params(windowed.init(jax.random.key(0))),
            ((1, 8),),
            True,
            0.0,
        ),
    }
