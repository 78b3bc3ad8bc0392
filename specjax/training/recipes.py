"""`--preset` of train.medusa: the recipes that were published, as options.

    medusa-legacy   the authors' first trainer, medusa/train/train_legacy.py of FasterDecoding/Medusa: three heads that
                    share the target's linear map, all of equal weight, two passes over the data
    medusa-1        Cai et al. 2024, arXiv 2401.10774, section 2.2.1 and appendix; the first stage of their second
                    trainer: five heads with maps of their own, head k weighing 0.8^k, on a frozen target, whose rate
                    of 5e-4 the heads take four times
    medusa-2        section 2.2.2, and the second stage: go on from medusa-1 (--initial) and tune the target with
                    LoRA of rank 32, the heads' loss counting 0.2 beside the target's own
    medusa-2-self   section 2.3.2: the same on what the target wrote (--data of train.generate), held to what it said
                    untuned by a divergence; smaller rates, and heads that count up to 0.01 along a sine

Two passes over the data is what all of them took: --steps says it here.  What is not reproduced: 8-bit optimizer
states, and the adapters' dropout of 0.05 (`train.lora` says why).  medusa-2-self leaves the batch to you.
"""

from __future__ import annotations

from typing import Any

_COMMON = {"num_layers": 1, "schedule": "cosine", "weight_decay": 0.0, "soft": False}
_HEADS = {**_COMMON, "num_heads": 5, "own_heads": True, "head_decay": 0.8}
_LORA = {**_HEADS, "lora_rank": 32, "lora_alpha": 16.0, "head_rate": 4.0}

PRESETS: dict[str, dict[str, Any]] = {
    "medusa-legacy": {
        **_COMMON, "num_heads": 3, "own_heads": False, "head_decay": 1.0, "learning_rate": 1e-3,
        "warmup_fraction": 0.1, "batch_size": 128, "sequence_length": 2048,
    },
    "medusa-1": {
        **_HEADS, "learning_rate": 2e-3, "warmup_steps": 40, "batch_size": 64, "sequence_length": 4096,
    },
    "medusa-2": {
        **_LORA, "learning_rate": 5e-4, "warmup_steps": 40, "batch_size": 64, "sequence_length": 4096,
        "heads_weight": 0.2, "heads_ramp": "constant", "self_distil": False,
    },
    "medusa-2-self": {
        **_LORA, "learning_rate": 1e-4, "warmup_steps": 20, "sequence_length": 2048,
        "heads_weight": 0.01, "heads_ramp": "sine", "self_distil": True,
    },
}  # fmt: skip
"""Name -> options; those of a command line or of a --config win."""
