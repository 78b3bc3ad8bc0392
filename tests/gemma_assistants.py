"""Small random assistants of Gemma 4, saved by transformers."""

from __future__ import annotations

import functools
import pathlib

import folders
import small_families
import torch
import transformers

CASES = {
    "31B": ("gemma4_text, as 31B", False),
    "E2B, by cluster": ("gemma4_text, as E2B", True),
    "12B": ("gemma4_unified_text, as 12B", False),
}
"""Name -> the case of `small_families`, and whether the head goes by clusters."""

CLUSTERS, BEST = 8, 3


@functools.cache
def folder(name: str) -> pathlib.Path:
    """The folder of a random assistant, saved by transformers."""
    case, clusters = CASES[name]
    theirs = {**small_families.stored()[0][case]["config"]}
    unified = case.startswith("gemma4_unified")
    kind = "gemma4_unified" if unified else "gemma4"
    text = {
        **theirs, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 3, "final_logit_softcapping": None, "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "use_double_wide_mlp": False, "head_dim": 8, "global_head_dim": 16,
    }  # fmt: skip
    for name_ in ("architectures", "per_layer_config", "transformers_version", "dtype"):
        text.pop(name_, None)
    config = transformers.AutoConfig.for_model(
        f"{kind}_assistant", text_config=text, backbone_hidden_size=theirs["hidden_size"],
        use_ordered_embeddings=clusters, num_centroids=CLUSTERS, centroid_intermediate_top_k=BEST,
    )  # fmt: skip
    prefix = "Gemma4Unified" if unified else "Gemma4"
    model = getattr(transformers, f"{prefix}AssistantForCausalLM")(config)
    generator = torch.Generator().manual_seed(5)
    for path, tensor in model.state_dict().items():
        if path.endswith("token_ordering"):
            tensor.copy_(torch.randperm(len(tensor), generator=generator))
        else:
            around = 1.0 if tensor.ndim == 1 else 0.0
            tensor.copy_(around + 0.3 * torch.randn(tensor.shape, generator=generator))
    made = folders.ROOT / f"assistant-{name.replace(' ', '-').replace(',', '')}"
    model.save_pretrained(made)
    return made
