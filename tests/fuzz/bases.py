"""Honest folders that the cases damage: a model of one layer of each family, and tokenizers."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

import specjax
from specjax.models import LinenModel, Rope, Router
from specjax.models.config import Beside
from specjax.models.mixers import AttentionSizes, GatedDelta, KimiDelta, Latent, Mamba2, ShortConv

VOCAB, TEXT = 300, "the cat sat on the mat and the dog ate the hat "

_SMALL = specjax.TransformerConfig(
    vocab_size=VOCAB, hidden_size=8, mlp_size=12, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=4, max_positions=64,
)  # fmt: skip
_WHOLE = {"num_kv_heads": 2, "norm": "layer", "gated": False, "qkv_bias": True, "out_bias": True,
          "mlp_bias": True}  # fmt: skip
_LEARNED = {**_WHOLE, "rope": None, "position_offset": 0, "tied_embeddings": True}
_EXPERTS = {"num_experts": 2, "experts_per_token": 1, "expert_size": 12}
_LATENT = {
    **_EXPERTS, "num_kv_heads": 2, "interleaved": True, "num_experts": 4, "shared_size": 12,
    "mixers": (Latent(kv_rank=6, nope_dim=3, rope_dim=4, value_dim=5, q_rank=6),),
}  # fmt: skip
_SIGMOID = {**_LATENT, "router": Router("sigmoid", corrected=True, groups=2, scale=2.0)}
_LATER = {"norm_order": "sandwich", "norm_offset": 1.0, "embedding_scale": 8**0.5,
          "tied_embeddings": True, "query_scale": 1 / 16, "activation": "gelu_tanh",
          "windows": (16,)}  # fmt: skip
_PROPORTIONAL = Rope(1e6, "proportional", 0.5)
_GEMMA4 = {"norm_order": "sandwich", "embedding_scale": 8**0.5, "tied_embeddings": True,
           "query_scale": 1.0, "qk_norm": "head", "value_norm": True, "activation": "gelu_tanh",
           "layer_scale": True, "rope": _PROPORTIONAL, "ropes": (_PROPORTIONAL,),
           "mixers": (AttentionSizes(2, 8, keys_as_values=True),)}  # fmt: skip
_DELTA: dict[str, object] = {
    "qk_norm": "head", "norm_offset": 1.0, "output_gate": True, "rope": Rope(fraction=0.5),
    "mixers": (GatedDelta(1, 2, 4, 4),),
}  # fmt: skip
_SHARED = {"shared_size": 6, "shared_gate": True}
_GROWS = Rope(kind="none", growth=0.1, original_max_positions=16, counted_from_one=True)
_MAMBA = Mamba2(heads=4, head_dim=4, state_dim=4)
_CHANGES: dict[str, dict[str, object]] = {
    "llama": {"rope": Rope(kind="llama3", factor=8.0)},
    "mistral": {"windows": (16,)},
    "mixtral": {**_EXPERTS, "rope": Rope(1e6)},
    "qwen2": {"qkv_bias": True, "rope": Rope(kind="yarn", factor=4.0, original_max_positions=16)},
    "mimo": {"qkv_bias": True},
    "qwen3": {"qk_norm": "head"},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS, **_SHARED},
    "qwen3_next": {**_DELTA, **_EXPERTS, **_SHARED},
    "qwen3_moe": {**_EXPERTS, "qk_norm": "head"},
    "gemma": {"norm_offset": 1.0, "embedding_scale": 8**0.5, "tied_embeddings": True,
              "activation": "gelu_tanh"},
    "gemma2": {**_LATER, "attention_softcap": 50.0, "logit_softcap": 30.0},
    "gemma3_text": {**_LATER, "qk_norm": "head", "rope": Rope(1e6), "ropes": (Rope(),)},
    "gemma4_text": {**_GEMMA4, "per_layer_size": 4},
    "gemma4_unified_text": _GEMMA4,
    "phi3": {"rope": Rope(kind="longrope", factors=(1.0, 1.0), original_max_positions=64)},
    "opt": {**_LEARNED, "position_offset": 2, "activation": "relu"},
    "gpt2": {**_LEARNED, "activation": "gelu_tanh"},
    "gpt_neox": {**_WHOLE, "norm_order": "parallel", "rope": Rope(fraction=0.5)},
    "smollm3": {"rope": Rope(2e6), "ropes": (Rope(2e6),), "tied_embeddings": True},
    "olmo2": {"norm_order": "post", "qk_norm": "whole"},
    "olmo3": {"norm_order": "post", "qk_norm": "whole", "rope": Rope(5e5), "windows": (16,)},
    "seed_oss": {"qkv_bias": True},
    "ministral3": {
        "rope": Rope(kind="yarn", factor=4.0, original_max_positions=16, growth=0.1)
    },
    "granite": {"embedding_scale": 2.0, "branch_scale": 0.5, "query_scale": 0.2,
                "logit_scale": 0.5},
    "exaone4": {"norm_order": "post", "qk_norm": "head", "windows": (16,), "ropes": (Rope(),)},
    "hunyuan_v1_dense": {"qk_norm": "head", "qk_norm_last": True},
    "ernie4_5": {"interleaved": True, "rope": Rope(5e5), "tied_embeddings": True},
    "glm4": {"interleaved": True, "norm_order": "sandwich", "rope": Rope(fraction=0.5),
             "qkv_bias": True},
    "cohere2": {"interleaved": True, "norm": "centred", "norm_order": "shared", "windows": (16,),
                "ropes": (Rope(),), "tied_embeddings": True, "logit_scale": 0.5},
    "starcoder2": {**_WHOLE, "num_kv_heads": 1, "tied_embeddings": True,
                   "activation": "gelu_tanh"},
    "stablelm": {"norm": "layer", "norm_order": "shared", "qk_norm": "heads",
                 "rope": Rope(fraction=0.5)},
    "deepseek_v2": {**_LATENT, "normalise_experts": False},
    "deepseek_v3": _SIGMOID,
    "kimi_k2": _SIGMOID,
    "kimi_linear": {**_SIGMOID, "mixers": (KimiDelta(2, 4),), "rope": None, "interleaved": False},
    "glm4_moe_lite": _SIGMOID,
    "mistral4": {
        **_LATENT, "rope": Rope(kind="yarn", factor=4.0, original_max_positions=16, growth=0.1)
    },
    "qwen2_moe": {**_EXPERTS, "qkv_bias": True, "shared_size": 6, "shared_gate": True},
    "glm4_moe": {**_EXPERTS, "rope": Rope(fraction=0.5), "shared_size": 12,
                 "router": Router("sigmoid", corrected=True, scale=1.5)},
    "llama4_text": {
        **_EXPERTS, "interleaved": True, "rope": Rope(5e5), "ropes": (_GROWS,), "windows": (16,),
        "chunked": True, "qk_norm": "unit", "qk_norm_last": True, "normalise_experts": False,
        "router": Router("sigmoid", of_chosen=True, on_input=True), "shared_size": 12,
    },
    "phimoe": {"num_experts": 2, "experts_per_token": 2, "expert_size": 12, "norm": "layer",
               "rope": Rope(1e6), "head_bias": True, "normalise_experts": False,
               "router": Router("sparsemixer")},
    "minimax_m2": {**_EXPERTS, "qk_norm": "whole", "rope": Rope(5e6, fraction=0.5),
                   "router": Router("sigmoid", corrected=True)},
    "gpt_oss": {**_EXPERTS, "qkv_bias": True, "out_bias": True, "sinks": True, "windows": (16,),
                "expert_bias": True, "normalise_experts": False, "gate_limit": 7.0,
                "router": Router(of_chosen=True, bias=True)},
    "ernie4_5_moe": {**_EXPERTS, "interleaved": True, "rope": Rope(5e5), "tied_embeddings": True,
                     "router": Router(corrected=True), "shared_size": 24},
    "lfm2": {"mixers": (ShortConv(8),), "qk_norm": "head", "tied_embeddings": True},
    "lfm2_moe": {"mixers": (ShortConv(8),), "qk_norm": "head", "tied_embeddings": True,
                 **_EXPERTS, "router": Router("sigmoid", corrected=True)},
    "granitemoehybrid": {"mixers": (_MAMBA,), "rope": None, "embedding_scale": 2.0,
                         "branch_scale": 0.5, "logit_scale": 0.5, "query_scale": 0.2},
    "falcon_h1": {"mixers": (dataclasses.replace(_MAMBA, norm=None, beside=Beside()),)},
    "nemotron_h": {"mixers": (_MAMBA,), "branches": ("mixer",), "rope": None, "gated": False,
                   "activation": "relu2", **_EXPERTS, "sparse": (False,), "shared_size": 12,
                   "router": Router("sigmoid", corrected=True)},
    "olmo_hybrid": {"mixers": (GatedDelta(1, 2, 4, 4, negative=True),), "qk_norm": "whole",
                    "norm_order": "post", "norm_orders": ("pre",), "rope": None},
}  # fmt: skip


def model(family: str, num_layers: int = 1, **sizes: object) -> specjax.LanguageModel:
    """A model of a family with random weights; nothing is compiled."""
    changes = {**_CHANGES[family], **sizes}
    config = dataclasses.replace(_SMALL, family=family, num_layers=num_layers, **changes)
    net = LinenModel(specjax.Transformer(config), np.dtype("float32"), None)
    shapes = jax.eval_shape(net.init, jax.random.key(0))
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: random.normal(0, 0.3, x.shape).astype(np.float32), shapes)
    return specjax.LanguageModel(net, params, tokenizer(), eos=(0,), name=family)


def write(family: str, folder: pathlib.Path, **sizes: object) -> pathlib.Path:
    """The folder of a model, with a tokenizer, a chat template and sampling defaults."""
    specjax.save(model(family, **sizes), folder)
    defaults = {
        "eos_token_id": [0],
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
    }
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    words = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder


@functools.cache
def tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE, as GPT-2 and Llama 3 have it."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT] * 4, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return made


@functools.cache
def tokenizer_files() -> list[dict]:
    """The contents of tokenizers of several kinds."""
    letters = ["<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz", "the", "▁the", "cat"]
    ids = {piece: number for number, piece in enumerate(letters)}
    unigram = tokenizers.Tokenizer(models.Unigram([(p, -1.0 - n) for p, n in ids.items()], 0))
    unigram.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
    unigram.decoder = decoders.Metaspace()
    spiece = tokenizers.Tokenizer(models.BPE(ids, [("t", "h"), ("th", "e")] * 0, unk_token="<unk>"))
    spiece.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    spiece.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    wordpiece = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="<unk>"))
    wordpiece.normalizer, wordpiece.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    words = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex(r"\s+|\w+"), "isolated"), pre_tokenizers.Digits()]
    )
    made = [unigram, spiece, wordpiece, words, tokenizer()]
    made[0].enable_truncation(8)
    made[1].enable_padding()
    return [json.loads(one.to_str()) for one in made]
