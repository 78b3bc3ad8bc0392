"""The windows of layers that a configuration leaves open are those of transformers."""

import pytest
import transformers
from window_layouts import LAYERS, LAYOUTS, SLIDING


@pytest.mark.parametrize("case", LAYOUTS)
def test_windows_are_those_of_transformers(case):
    """`test_draft_windows.py` compares ours with the same table."""
    fields, windows = LAYOUTS[case]
    made = transformers.Qwen3Config(num_hidden_layers=LAYERS, **fields)
    slides = [kind == SLIDING for kind in made.layer_types]
    assert tuple(made.sliding_window if x else None for x in slides) == windows
