"""Tensors of a family's table, fused, interleaved and stacked, against files laid out by NumPy."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import linen as nn

from specjax.files.tensors import _reader, all_finite, read_params, write_params
from specjax.models import Family, LinenModel, Tensor

SHAPES = {
    "embedding": (7, 4),
    "head": (4, 7),
    **dict.fromkeys("qkv", (4, 6)),  # one after the other, as in Phi-3
    **dict.fromkeys("QKV", (4, 6)),  # a head's query, key and value together, as in GPT-NeoX
    **{f"{part}_bias": (6,) for part in "QKV"},
    "gate": (4, 5),  # side by side and not transposed, as in GPT-2
    "up": (4, 5),
    "experts": (3, 4, 5),  # a tensor per expert
    "stack": (3, 5, 4),  # one tensor for all experts
    "whole": (3, 4, 5),  # the same, and each matrix is transposed
}


@dataclasses.dataclass(frozen=True)
class Config:
    tied_embeddings: bool = False
    least_tensors = 0
    num_layers = 0


class Net(nn.Module):
    config: Config = Config()
    separate_head: bool = False
    vocab_size = 7  # this module is only read, never decoded with
    max_positions = 9
    num_taps = 0

    @nn.compact
    def __call__(self, tokens: Any, positions: Any) -> None:
        for name, shape in SHAPES.items():
            if name != "head" or self.separate_head or not self.config.tied_embeddings:
                self.param(name, nn.initializers.normal(1.0), shape)


def tensors(config: Config) -> list[Tensor]:
    table = [Tensor("root.words", ("embedding",))]
    if not config.tied_embeddings:
        table.append(Tensor("words_out", ("head",), transpose=True))
    for n, part in enumerate("qkv"):
        table.append(
            Tensor("root.qkv", (part,), True, shape=(18, 4), index=(slice(6 * n, 6 * n + 6),))
        )
    for n, part in enumerate("QKV"):
        index = (slice(None), n)
        table.append(
            Tensor("root.heads", (part,), True, shape=(18, 4), view=(3, 3, 2, 4), index=index)
        )
        table.append(
            Tensor("root.heads_bias", (f"{part}_bias",), shape=(18,), view=(3, 3, 2), index=index)
        )
    for n, part in enumerate(("gate", "up")):
        table.append(
            Tensor(
                "root.wide", (part,), shape=(4, 10), index=(slice(None), slice(5 * n, 5 * n + 5))
            )
        )
    table.append(Tensor("root.whole", ("whole",), transpose=True))
    for e in range(3):
        table.append(Tensor(f"root.expert.{e}", ("experts",), transpose=True, at=e))
        table.append(Tensor("root.stack", ("stack",), at=e, shape=(3, 5, 4), index=(e,)))
    return table


FAMILY = Family(
    "Toy", Config, dataclasses.asdict, tensors, (".buffer",), prefixes={"root.": ("root.", "")}
)
MODEL = LinenModel(Net())


def params(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def by_hand(p: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The content of the file, written element by element."""
    heads, bias = np.zeros((18, 4), p["Q"].dtype), np.zeros(18, p["Q"].dtype)
    for head, part, feature in itertools.product(range(3), range(3), range(2)):
        row = 6 * head + 2 * part + feature
        heads[row] = p["QKV"[part]][:, 2 * head + feature]
        bias[row] = p["QKV"[part] + "_bias"][2 * head + feature]
    return {
        "root.words": p["embedding"],
        "words_out": np.ascontiguousarray(p["head"].T),
        "root.qkv": np.concatenate([p["q"], p["k"], p["v"]], axis=1).T.copy(),
        "root.heads": heads,
        "root.heads_bias": bias,
        "root.wide": np.hstack([p["gate"], p["up"]]),
        "root.stack": p["stack"],
        "root.whole": np.ascontiguousarray(p["whole"].swapaxes(1, 2)),
        **{f"root.expert.{e}": np.ascontiguousarray(p["experts"][e].T) for e in range(3)},
    }


def assert_same(actual, wanted):
    assert actual.keys() == wanted.keys()
    for name, leaf in wanted.items():
        assert actual[name].dtype == leaf.dtype
        np.testing.assert_array_equal(np.asarray(actual[name]), leaf, err_msg=name)


def stored(folder, change=lambda tensors: None, dtype=np.float32):
    arrays = by_hand(params(dtype))
    change(arrays)
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_files_hold_what_numpy_lays_out(tmp_path, dtype):
    """Files have the layout written by hand, and reading gives the parameters back, bit for bit."""
    wanted = params(dtype)
    written = write_params(tmp_path / "model.safetensors", FAMILY, Config(), wanted)
    assert written == (dtype, None)
    assert_same(safetensors.numpy.load_file(tmp_path / "model.safetensors"), by_hand(wanted))
    assert_same(read_params(stored(tmp_path, dtype=dtype), FAMILY, MODEL, dtype), wanted)


def test_numbers_are_converted_as_they_are_read(tmp_path):
    """float64 and mixed dtypes become the requested dtype."""

    def widen(tensors):
        tensors["root.qkv"] = tensors["root.qkv"].astype(np.float64)
        tensors["root.expert.1"] = tensors["root.expert.1"].astype(np.float16)

    read = read_params(stored(tmp_path, widen), FAMILY, MODEL, jnp.bfloat16)
    wanted = {name: leaf.astype(jnp.bfloat16) for name, leaf in params().items()}
    wanted["experts"][1] = params()["experts"][1].astype(np.float16).astype(jnp.bfloat16)
    assert_same(read, wanted)


def test_dtypes_are_aligned_in_a_mixed_file(tmp_path):
    """PyTorch readers require offsets that are multiples of the item size."""
    mixed = {**params(jnp.bfloat16), "Q_bias": params()["Q_bias"], "K_bias": params()["K_bias"]}
    mixed["V_bias"] = params()["V_bias"]
    write_params(tmp_path / "model.safetensors", FAMILY, Config(), mixed)
    arrays = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert arrays["root.heads_bias"].dtype == np.float32
    content = (tmp_path / "model.safetensors").read_bytes()
    assert content.index(arrays["root.heads_bias"].tobytes()) % 4 == 0


@pytest.mark.parametrize("name", ["q", "K", "V_bias", "up", "experts", "stack", "whole"])
def test_a_device_reads_its_slice(tmp_path, name):
    """For every kind of parameter, each slice equals that slice of the whole."""
    from specjax.files.headers import open_tensors

    files, _ = open_tensors([stored(tmp_path) / "model.safetensors"])
    whole, rows = params()[name], [row for row in tensors(Config()) if row.path == (name,)]
    read = _reader(rows, whole.shape, files, np.float32, set())
    choices = [(slice(None), slice(0, 1), slice(size // 2, size)) for size in whole.shape]
    for index in itertools.product(*choices):
        np.testing.assert_array_equal(read(index), whole[index])


def test_older_files_leave_the_prefix_out(tmp_path):
    """Either all names lack the prefix or none."""

    def shorten(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("root.")] = tensors.pop(name)

    assert_same(read_params(stored(tmp_path, shorten), FAMILY, MODEL, np.float32), params())
    with pytest.raises(ValueError) as caught:
        read_params(
            stored(tmp_path, lambda t: t.update(qkv=t.pop("root.qkv"))), FAMILY, MODEL, np.float32
        )
    assert "root.qkv is missing (shape [18, 4])" in str(caught.value)
    assert "qkv is not a tensor of this architecture" in str(caught.value)


def test_all_faults_at_once(tmp_path):
    """Fused and stacked tensors are checked as they are stored, each once."""

    def spoil(tensors):
        del tensors["root.heads"], tensors["root.expert.1"]
        tensors["root.qkv"] = tensors["root.qkv"][:12]
        tensors["root.wide"] = tensors["root.wide"].astype(np.int8)
        tensors["root.expert.3"] = tensors["root.expert.2"]
        tensors["root.h.buffer"] = np.zeros(3, bool)  # ignored

    with pytest.raises(ValueError) as caught:
        read_params(stored(tmp_path, spoil), FAMILY, MODEL, np.float32)
    assert sorted(str(caught.value).splitlines()[1:]) == [
        "  root.expert.1 is missing (shape [5, 4])",
        "  root.expert.3 is not a tensor of this architecture",
        "  root.heads is missing (shape [18, 4])",
        "  root.qkv has shape [12, 4] instead of [18, 4]",
        "  root.wide is stored as I8; specjax reads F32, BF16, F16, F64",
    ]


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_numbers_that_are_not_finite(tmp_path, kind, dtype):
    """One error names all tensors with NaN or infinities, in every way that a tensor is stored."""

    def spoil(tensors):
        tensors["root.qkv"][17, 3] = np.nan
        tensors["root.heads_bias"][4] = -np.inf
        tensors["root.expert.1"][0, 0] = np.inf
        tensors["root.stack"][2, 4, 3] = np.nan
        tensors["root.stack"][0, 0, :2] = -np.inf

    with pytest.raises(ValueError, match="are not finite") as caught:
        read_params(stored(tmp_path, spoil, kind), FAMILY, MODEL, dtype)
    cure = ": download it again; if it was trained so, take a checkpoint from before its loss"
    cure += " diverged"
    assert str(caught.value).splitlines()[1:] == [
        f"  root.expert.1 holds 0 NaN and 1 infinities{cure}",
        f"  root.heads_bias holds 0 NaN and 1 infinities{cure}",
        f"  root.qkv holds 1 NaN and 0 infinities{cure}",
        f"  root.stack holds 1 NaN and 2 infinities{cure}",
    ]


def test_numbers_beyond_the_dtype(tmp_path):
    """float16 would turn such numbers into infinities; bfloat16 can hold them."""
    folder = stored(tmp_path, lambda tensors: tensors["root.wide"].__setitem__((3, 9), -1e5))
    message = r"root.wide goes up to 1e\+05, beyond float16: load it in bfloat16"
    with pytest.raises(ValueError, match=message):
        read_params(folder, FAMILY, MODEL, np.float16)
    assert np.asarray(read_params(folder, FAMILY, MODEL, jnp.bfloat16)["up"]).min() < -9e4


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_what_is_finite(dtype):
    """The largest and smallest numbers are finite; a NaN is found at any position."""
    numbers = np.zeros(3 * 2**17 + 5, dtype)
    greatest = jnp.finfo(dtype).max
    numbers[:6] = [greatest, -greatest, jnp.finfo(dtype).tiny, -0.0, 1, -1]
    assert all_finite(numbers)
    for at in (0, 2**17 - 1, 2**17, len(numbers) - 1):
        for value in (np.nan, -np.nan, np.inf, -np.inf):
            spoilt = numbers.copy()
            spoilt[at] = value
            assert not all_finite(spoilt)


def test_a_tensor_that_is_read_in_part(tmp_path):
    """A table that skips a part of a tensor is refused, since that part would be lost."""

    def some(config):
        return [row for row in tensors(config) if row.path != ("k",)]

    class Less(Net):
        @nn.compact
        def __call__(self, tokens, positions):
            for name, shape in SHAPES.items():
                if name != "k":
                    self.param(name, nn.initializers.normal(1.0), shape)

    with pytest.raises(
        ValueError, match=r"root.qkv holds 72 numbers, of which the family's table reads 48"
    ):
        read_params(
            stored(tmp_path),
            dataclasses.replace(FAMILY, tensors=some),
            LinenModel(Less()),
            np.float32,
        )


def test_a_parameter_without_a_tensor(tmp_path):
    """A table that lacks a parameter is refused here, and not at the first pass."""

    def some(config):
        return [row for row in tensors(config) if row.path != ("embedding",)]

    with pytest.raises(ValueError, match="embedding"):
        read_params(stored(tmp_path), dataclasses.replace(FAMILY, tensors=some), MODEL, np.float32)


def test_a_tied_copy_is_ignored(tmp_path):
    """A second copy of a tied embedding, under any of the family's names, is no error."""
    read = read_params(
        stored(tmp_path), FAMILY, LinenModel(Net(Config(tied_embeddings=True))), np.float32
    )
    assert_same(read, {name: leaf for name, leaf in params().items() if name != "head"})


def test_a_damaged_file_names_itself(tmp_path):
    """The header promises more bytes than the file has."""
    file = stored(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged or truncated"):
        read_params(tmp_path, FAMILY, MODEL, np.float32)


def test_the_file_can_go_once_it_is_read(tmp_path):
    """Parameters are copies: overwriting the file does not change them."""
    read = read_params(stored(tmp_path), FAMILY, MODEL, np.float32)
    file = tmp_path / "model.safetensors"
    size = file.stat().st_size
    with open(file, "r+b") as stream:
        stream.write(b"\xff" * size)
    assert_same(jax.device_get(read), params())
