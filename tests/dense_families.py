"""Configurations of small models of the dense families, for transformers."""

from __future__ import annotations

from typing import Any

_Cases = dict[str, dict[str, Any]]


def cases(sizes: dict[str, Any], original: int) -> dict[str, _Cases]:
    """Family -> name of a case -> configuration.

    `sizes` are those of a model with four heads, and `original` is the context before a rope was
    scaled, which must be shorter than the texts.
    """
    grouped = {**sizes, "num_key_value_heads": 2}
    heads = {**grouped, "head_dim": sizes["hidden_size"] // 4 + 2}
    window = original // 2
    yarn = {
        "rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    kinds = {
        "full_attention": yarn,
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    slides = {
        "num_hidden_layers": 2,
        "sliding_window": window,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    ministral = {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
    multipliers = {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4,
        "logits_scaling": 0.6,
    }  # fmt: skip
    alpha = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}
    partial = {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5}
    return {
        "olmo3": {
            "three to one": {**grouped, "num_hidden_layers": 4, "sliding_window": window},
            "two ropes, bias": {
                **grouped, **slides, "rope_parameters": kinds, "attention_bias": True
            },
        },
        "mimo": {"biases": {**grouped, "use_sliding_window": False, "sliding_window": None}},
        "seed_oss": {
            "biases": heads,
            "other biases": {
                **heads, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True,
                "tie_word_embeddings": True,
            },
        },
        "ministral3": {
            "growth": {**heads, "rope_parameters": ministral},
            "window": {
                **heads, "rope_parameters": {**ministral, "mscale": 0.5}, "sliding_window": window
            },
        },
        "granite": {
            "multipliers": {**grouped, **multipliers},
            "tied, biases": {
                **grouped, **multipliers, "tie_word_embeddings": True, "attention_bias": True,
                "mlp_bias": True,
            },
        },
        "exaone4": {
            "hybrid": {**grouped, **slides},
            "all full": {
                **heads, "sliding_window": None, "layer_types": ["full_attention"],
                "num_hidden_layers": 1, "tie_word_embeddings": True,
            },
        },
        "hunyuan_v1_dense": {
            "alpha": {**heads, "rope_parameters": alpha, "attention_bias": True},
            "plain": {**heads, "tie_word_embeddings": True},
        },
        "ernie4_5": {
            "tied": heads,
            "biases": {**heads, "use_bias": True, "tie_word_embeddings": False},
        },
        "glm4": {
            "half": {**heads, "head_dim": 8},
            "no bias": {
                **heads, "head_dim": 8, "attention_bias": False,
                "rope_parameters": {**partial, "partial_rotary_factor": 0.75},
            },
        },
        "cohere2": {
            "tied": {**grouped, **slides, "logit_scale": 0.9},
            "untied, bias": {
                **grouped, **slides, "attention_bias": True, "tie_word_embeddings": False,
                "logit_scale": 0.5,
            },
        },
        "starcoder2": {
            "biases": {**grouped, "sliding_window": window},
            "no bias": {**grouped, "use_bias": False, "tie_word_embeddings": False},
        },
        "stablelm": {
            "in turn, biases": {
                **grouped, "use_qkv_bias": True, "tie_word_embeddings": True,
                "rope_parameters": partial,
            },
            "parallel, norms of heads": {
                **grouped, "use_parallel_residual": True, "qk_layernorm": True,
                "rope_parameters": partial,
            },
        },
    }  # fmt: skip
