"""`--preset` of train.medusa: published recipes as options.

    medusa-legacy   the authors' first trainer, medusa/train/train_legacy.py of
                    FasterDecoding/Medusa: three heads of equal weight that share the target's
                    linear map
    medusa-1        Cai et al. 2024, arXiv 2401.10774, section 2.2.1 and appendix, and the first
                    stage of the authors' second trainer: five heads with linear maps of their own
                    on a frozen target; head k has weight 0.8^k, and the learning rate of the heads
                    is four times the base rate of 5e-4
    medusa-2        section 2.2.2, and the second stage: continues from medusa-1 (--initial) and
                    tunes the target with LoRA of rank 32; the loss of the heads has weight 0.2
                    beside the target's own loss
    medusa-2-self   section 2.3.2: the same on text that the target wrote (--data of
                    train.generate); a divergence keeps the target close to its untuned self; the
                    rates are smaller, and the weight of the heads rises to 0.01 along a sine

All of them took two passes over the data, which is set with --steps here.  Not reproduced are the
8-bit optimizer states and the dropout of 0.05 in the adapters (`specjax.training.lora` says why).
medusa-2-self does not set a batch size.
"""

from __future__ import annotations

Recipe = dict[str, int | float | str | bool]

_COMMON: Recipe = {"num_layers": 1, "schedule": "cosine", "weight_decay": 0.0, "soft": False}
_HEADS: Recipe = {**_COMMON, "num_heads": 5, "own_heads": True, "head_decay": 0.8}
_LORA: Recipe = {**_HEADS, "lora_rank": 32, "lora_alpha": 16.0, "head_rate": 4.0}

PRESETS: dict[str, Recipe] = {
    "medusa-legacy": {
        **_COMMON,
        "num_heads": 3,
        "own_heads": False,
        "head_decay": 1.0,
        "learning_rate": 1e-3,
        "warmup_fraction": 0.1,
        "batch_size": 128,
        "sequence_length": 2048,
    },
    "medusa-1": {
        **_HEADS,
        "learning_rate": 2e-3,
        "warmup_steps": 40,
        "batch_size": 64,
        "sequence_length": 4096,
    },
    "medusa-2": {
        **_LORA,
        "learning_rate": 5e-4,
        "warmup_steps": 40,
        "batch_size": 64,
        "sequence_length": 4096,
        "heads_weight": 0.2,
        "heads_ramp": "constant",
        "self_distil": False,
    },
    "medusa-2-self": {
        **_LORA,
        "learning_rate": 1e-4,
        "warmup_steps": 20,
        "sequence_length": 2048,
        "heads_weight": 0.01,
        "heads_ramp": "sine",
        "self_distil": True,
    },
}
"""Options by the name of the recipe.  A command line or a --config overrides them."""
