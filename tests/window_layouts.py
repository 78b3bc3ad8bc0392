"""Fields of three layers of a drafter, and the windows that transformers' Qwen3Config derives."""

SLIDING, FULL = "sliding_attention", "full_attention"
LAYERS = 3
USED = {"use_sliding_window": True, "sliding_window": 9}
LAYOUTS = {
    "none": ({}, (None, None, None)),
    "unused": ({"sliding_window": 9, "max_window_layers": 0}, (None, None, None)),
    "switched off": ({**USED, "use_sliding_window": False}, (None, None, None)),
    "from layer 1": ({**USED, "max_window_layers": 1}, (None, 9, 9)),
    "all": ({**USED, "max_window_layers": 0}, (9, 9, 9)),
    "beyond the last layer": (USED, (None, None, None)),
    "no types": ({**USED, "max_window_layers": 2, "layer_types": None}, (None, None, 9)),
    "types": ({**USED, "layer_types": [SLIDING, FULL, SLIDING]}, (9, None, 9)),
    "types before numbers": (
        {**USED, "max_window_layers": 1, "layer_types": [SLIDING, FULL, FULL]}, (9, None, None),
    ),
    "types without windows": (
        {**USED, "use_sliding_window": False, "layer_types": [SLIDING] * 3}, (None, None, None),
    ),
    "the default size": ({"use_sliding_window": True, "max_window_layers": 2}, (None, None, 4096)),
    "no size": ({**USED, "sliding_window": None, "max_window_layers": 0}, (None, None, None)),
}  # fmt: skip
