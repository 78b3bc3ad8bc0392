"""An output matrix with a bias: whatever multiplies hidden states with the matrix refuses it."""

import pytest
import small_families

import specjax
from specjax.models import head_matrix


def test_it_is_refused_and_not_left_out():
    loaded = specjax.load(small_families.folder("phimoe, biases"))
    assert "bias" in loaded.params["head"]
    with pytest.raises(ValueError, match=r"has a bias \(lm_head_bias\)"):
        head_matrix(loaded.params)
