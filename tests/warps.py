"""Sampling settings and logits, whose warps by transformers are stored.

`fixtures/transformers.npz` has the tokens that transformers keeps; the logits that are kept are
divided by the temperature.
"""

import numpy as np

SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.05},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.02},
    {"min_p": 0.5},
    {"min_p": 1.0},
    {
        "temperature": 0.7,
        "top_p": 0.8,
    },  # a filter before the temperature would keep other tokens
    {"temperature": 1.6, "min_p": 0.1},
    {"top_k": 7, "top_p": 0.6},
    {"top_p": 0.7, "min_p": 0.2},
    {"temperature": 0.6, "top_k": 9, "top_p": 0.85, "min_p": 0.05},
    {"temperature": 1.8, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
]
DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
LOGITS = np.random.default_rng(0).normal(size=(len(SETTINGS), 6, 61)).astype(np.float32) * 3
