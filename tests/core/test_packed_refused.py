"""Bad folders of packed weights are refused by the names of their tensors, with the cure."""

import folders
import numpy as np
import packed_folders
import pytest

GATE = "model.layers.0.mlp.gate_proj."


def folder(tmp_path, format):
    model = folders.random_llama(0, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    packed_folders.packed(model, format).save_pretrained(tmp_path)
    return tmp_path


def spoil(tensors, end, change):
    tensors[GATE + end] = change(tensors[GATE + end])


FAULTS = {
    "no scales": ("gptq", lambda t: t.pop(GATE + "scales"), f"qweight has no {GATE}scales"),
    "no zeros": ("awq", lambda t: t.pop(GATE + "qzeros"), f"qweight has no {GATE}qzeros"),
    "no scale of FP8": (
        "fp8",
        lambda t: t.pop(GATE + "weight_scale_inv"),
        f"{GATE}weight has no {GATE}weight_scale_inv or {GATE}weight_scale",
    ),
    "no shape": ("int4", lambda t: t.pop(GATE + "weight_shape"), f"no {GATE}weight_shape"),
    "a scale is NaN": (
        "int4",
        lambda t: t[GATE + "weight_scale"].__setitem__((3, 1), np.nan),
        "weight_scale holds 1 numbers that are NaN or infinite",
    ),
    "a scale of e4m3 is NaN": (
        "nvfp4",
        lambda t: t[GATE + "weight_scale"].__setitem__((3, 1), np.nan),
        "weight_scale holds 1 numbers that are NaN or infinite",
    ),
    "too few groups": (
        "gptq", lambda t: spoil(t, "scales", lambda x: x[:3]), "qzeros has shape [4, 12]",
    ),
    "too many groups": (
        "awq",
        lambda t: [spoil(t, end, lambda x: np.concatenate([x, x])) for end in ("scales", "qzeros")],
        "scales has 8 groups, and 64 inputs in groups of 16 have 4",
    ),
    "blocks of another size": (
        "fp8",
        lambda t: spoil(t, "weight_scale_inv", lambda x: x[:2]),
        "its _scale_inv has shape [2, 4] instead of [3, 4] (blocks of [32, 16]), [96, 1] or [1]",
    ),
    "words of another width": (
        "int4",
        lambda t: spoil(t, "weight_packed", lambda x: x[:, :-1]),
        "weight_packed has shape [96, 7]; weight_shape is [96, 64]",
    ),
    "an order that fills no groups": (
        "act-order",
        lambda t: t[GATE + "g_idx"].__setitem__(slice(None), 0),
        "g_idx does not put 16 inputs into each group",
    ),
    "a matrix twice": (
        "gptq",
        lambda t: t.__setitem__(GATE + "weight", np.zeros((96, 64), np.float32)),
        f"{GATE}weight is in the files both packed, as {GATE}qweight, and plain",
    ),
    "another matrix": (
        "gptq",
        lambda t: [
            spoil(t, end, lambda x, n=n: np.ascontiguousarray(x[:, :n]))
            for end, n in (("qweight", 48), ("scales", 48), ("qzeros", 6))
        ],
        f"{GATE}weight has shape [48, 64] instead of [96, 64]",
    ),
    "a factor that is not known": (
        "nvfp4",
        lambda t: t.__setitem__(GATE + "pre_quant_scale", np.ones(64, np.float32)),
        f"{GATE}pre_quant_scale is not a tensor of this architecture",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_refused_by_the_name_of_the_tensor(tmp_path, fault):
    """Nothing is compiled, and the error has the tensor and what it should be."""
    format, change, message = FAULTS[fault]
    made = folder(tmp_path, format)
    packed_folders.change_tensors(made, change)
    folders.refused(ValueError, made, GATE, message)


def test_a_number_is_nan(tmp_path):
    """The codes of FP8 can be NaN, which only reading them shows."""
    made = folder(tmp_path, "fp8")
    packed_folders.change_tensors(made, lambda t: t[GATE + "weight"].__setitem__((5, 6), np.nan))
    for dequantise in (False, True):
        message = folders.refused(
            ValueError, made, f"{GATE}weight holds 1 NaN", "not finite", dequantise=dequantise
        )
        assert "up_proj" not in message


def test_a_bias_that_is_not_zero(tmp_path):
    """AutoGPTQ wrote biases of zero beside its matrices; others belong to another model."""
    made = folder(tmp_path, "gptq")
    packed_folders.change_tensors(made, lambda t: t[GATE + "bias"].__setitem__(3, 1.0))
    folders.refused(ValueError, made, f"{GATE}bias is not a tensor of this architecture")
