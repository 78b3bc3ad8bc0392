"""The text models of multimodal folders that transformers writes: equal logits, and saved copies
that transformers reads as text models."""

import latent_families
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
import transformers_folders
from test_models import ours, theirs

import specjax

TEXT = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 640,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
HEADS = {**TEXT, "head_dim": 24}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 160, "llama_4_scaling_beta": 0.3,
}  # fmt: skip
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
TURNS = ["sliding_attention", "full_attention"] * 2
SIGLIP = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
PIXTRAL = {**SIGLIP, "model_type": "pixtral", "head_dim": 8}
QWEN = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 64,
    "patch_size": 14,
}  # fmt: skip
QWEN3 = {**QWEN, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]}

CONFIGS = {
    "gemma3": (
        {
            **HEADS, "query_pre_attn_scalar": 20, "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": TWO_ROPES,
        },
        SIGLIP,
        {},
    ),
    "gemma4": (
        {
            **HEADS, "global_head_dim": 32, "sliding_window": 33, "layer_types": TURNS,
            "num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 96,
        },
        {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
            "position_embedding_size": 16,
        },
        {
            "audio_config": {
                "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                "subsampling_conv_channels": [8, 8], "output_proj_dims": 16,
            }
        },
    ),
    "gemma4_unified": (
        {
            **HEADS, "global_head_dim": 32, "sliding_window": 33, "layer_types": TURNS[:2],
            "attention_k_eq_v": True, "num_global_key_value_heads": 1,
            "tie_word_embeddings": False,
        },
        {"mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 16},
        {"audio_config": {"audio_embed_dim": 16}},
    ),
    "llama4": (
        {
            **HEADS, "intermediate_size_mlp": 60, "num_local_experts": 3, "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2, "attention_chunk_size": 33, "floor_scale": 50,
        },
        {
            **SIGLIP, "vision_output_dim": 16, "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        {},
    ),
    "mistral3": ({**HEADS, "model_type": "mistral", "sliding_window": None}, PIXTRAL, {}),
    "mistral3, ministral3, untied": (
        {**HEADS, "model_type": "ministral3", "rope_parameters": YARN},
        PIXTRAL,
        {"tie_word_embeddings": False},
    ),
    "mistral3, mistral4": (
        {
            **latent_families.cases(TEXT, original=160)["mistral4"]["growing queries"],
            "model_type": "mistral4",
        },
        PIXTRAL,
        {"tie_word_embeddings": False},
    ),
    "qwen2_5_vl": ({**TEXT, "rope_parameters": MROPE}, QWEN, {}),
    "qwen2_5_vl, windows, tied": (
        {
            **TEXT, "rope_parameters": MROPE, "use_sliding_window": True, "sliding_window": 40,
            "max_window_layers": 1,
        },
        QWEN,
        {"tie_word_embeddings": True},
    ),
    "qwen3_5": (
        {
            **HEADS, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 12, "linear_value_head_dim": 10, "num_hidden_layers": 4,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1], "mrope_interleaved": True,
            },
        },
        {**QWEN3, "deepstack_visual_indexes": []},
        {},
    ),
    "qwen3_5_moe": (
        {
            **HEADS, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 12, "linear_value_head_dim": 10, "num_hidden_layers": 4,
            "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 10, "rms_norm_eps": 0.05,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1], "mrope_interleaved": True,
            },
        },
        {**QWEN3, "deepstack_visual_indexes": []},
        {},
    ),
    "qwen3_vl": (
        {**HEADS, "rope_parameters": {**MROPE, "mrope_interleaved": True}, "attention_bias": True},
        QWEN3,
        {"tie_word_embeddings": True},
    ),
    "qwen3_vl_moe": (
        {
            **HEADS, "rope_parameters": {**MROPE, "mrope_interleaved": True}, "num_experts": 5,
            "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [0],
            "tie_word_embeddings": False,
        },
        QWEN3,
        {},
    ),
}  # fmt: skip
"""Name -> the configurations of the text model and the vision model, and the other fields."""


def test_every_kind_is_here():
    assert {name.split(",")[0] for name in CONFIGS} == set(specjax.models.NESTED)


@pytest.mark.parametrize("published", [True, False], ids=["names as published", "names of 5"])
@pytest.mark.parametrize("case", CONFIGS)
def test_parity(case, published):
    text, vision, outer = CONFIGS[case]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        case.split(",")[0], text_config=text, vision_config=vision, **outer
    )
    model = transformers.AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager"
    ).eval()
    middle = 0.0 if case in ("gemma3", "qwen3_5", "qwen3_5_moe") else 1.0
    later = case.startswith("gemma4")  # with larger weights float32 differs from float64 by 1e-3
    spread = 0.06 if later else 0.15
    with torch.no_grad():
        scalars = [(name, leaf) for name, leaf in model.named_buffers() if "layer_scalar" in name]
        for name, leaf in [*model.named_parameters(), *scalars]:
            one = leaf.ndim == 1 and not name.endswith("bias")
            leaf.normal_(middle if one else 0.0, 0.3 if leaf.ndim == 1 else spread)
            if later and "q_norm" in name:
                leaf.mul_(0.3)  # scores are not divided by the size of a head
    name = f"nested-{case}-{published}".replace(" ", "").replace(",", "-")
    folder = transformers_folders.write(model, name, tokens=False, save_original_format=published)
    if case == "qwen3_vl_moe" and published:  # publishers wrote these as [in, out]
        file = folder / "model.safetensors"
        tensors = safetensors.numpy.load_file(file)
        for part in [name for name in tensors if ".experts." in name]:
            tensors[part] = np.ascontiguousarray(tensors[part].swapaxes(1, 2))
        safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
    tokens = np.random.default_rng(0).integers(0, 96, (1, 500)).astype(np.int32)
    # transformers 5.24 can only read Llama 4's folders with an image; its text model reads texts.
    oracle = model.language_model if case == "llama4" else model
    wanted, loaded = theirs(oracle, tokens), specjax.load(folder)
    assert wanted.std() > 0.3, "logits too flat to tell models apart"
    found = ours(loaded, tokens)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-5 * np.abs(wanted).max())
    copy = folder.with_name(folder.name + "-copy")
    specjax.save(loaded, copy)
    auto = transformers_folders.auto(text.get("model_type", ""))
    again = auto.from_pretrained(copy, attn_implementation="eager").eval()
    np.testing.assert_array_equal(theirs(again, tokens), wanted)
