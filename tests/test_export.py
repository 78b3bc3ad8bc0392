"""Exports: what every engine's loader would find in a folder, the way back bit for bit, and each known trap.

The engines skip in silence what they do not know and leave at random what they miss.  So `READERS` states again, from
their loaders and apart from `train.formats`, which tensors each takes; here more or fewer of them are an error.
"""

import dataclasses
import itertools
import json
import pathlib
import shutil
import sys
from typing import Any

import folders
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch

import specjax
from specjax.bank import target_marks
from specjax.models.medusa import medusa_features, medusa_logits
from specjax.models.transformer import head_matrix
from train import export
from train.formats import FORMATS, Form, Heads
from train.heads import read_heads, write_heads

TINY = pathlib.Path(__file__).parent.parent / "checkpoints" / "tiny"
E, V = 6, 10
HEAD = np.random.default_rng(9).normal(size=(V, E)).astype(np.float32)
OURS = {"choices": [[0], [1], [0, 0]], "acceptance": [0.5, 0.25, 0.125], "target": []}
CASES = {"v1": (1, True), "v1 deep": (2, True), "v2": (1, False), "v2 deep": (2, False)}
ENGINES = [name for name in FORMATS if name != "specjax"]


def heads_of(layers, own, kind="bfloat16", size=E, vocab=V, repeated=False):
    """Three heads of random numbers, under the authors' names."""
    rng, tensors = np.random.default_rng(layers), {}
    for h in range(3):
        for k in range(layers):
            tensors[f"{h}.{k}.linear.weight"] = rng.normal(0, 0.3, size=(size, size))
            tensors[f"{h}.{k}.linear.bias"] = rng.normal(0, 0.3, size=size)
            if repeated and k:
                for end in ("weight", "bias"):
                    tensors[f"{h}.{k}.linear.{end}"] = tensors[f"{h}.0.linear.{end}"]
        if own:
            tensors[f"{h}.{layers}.weight"] = rng.normal(size=(vocab, size))
    cast = {name: tensor.astype(jnp.dtype(kind)) for name, tensor in tensors.items()}
    return Heads(Form(3, layers, own, "some/target", OURS), cast)


def can_say(name, case):
    """Formats that have no words for a case; the traps below show that they refuse it."""
    return not (name == "original" and "deep" in case) and not (name == "tgi" and case == "v2 deep")


ALL = [(name, case) for name in FORMATS for case in CASES if can_say(name, case)]


# What the loaders take.  Each gives, for head after head, its blocks [(W, b), ...] and its map to the vocabulary.


def take(stored, wanted):
    """The tensors `wanted`, name -> shape, and no others, all of one floating type."""
    assert set(stored) == set(wanted)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == wanted
    assert len({str(tensor.dtype) for tensor in stored.values()}) == 1
    return stored


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def authors_heads(stored, heads, layers, own, prefix=""):
    wanted = {}
    for h, k in itertools.product(range(heads), range(layers)):
        wanted |= {f"{prefix}{h}.{k}.linear.weight": (E, E), f"{prefix}{h}.{k}.linear.bias": (E,)}
    wanted |= {f"{prefix}{h}.{layers}.weight": (V, E) for h in range(heads) if own}
    found = take(stored, wanted)
    return [
        ([(found[f"{prefix}{h}.{k}.linear.weight"], found[f"{prefix}{h}.{k}.linear.bias"]) for k in range(layers)],
         found[f"{prefix}{h}.{layers}.weight"] if own else None)
        for h in range(heads)
    ]  # fmt: skip


def original_reader(folder):
    """The authors': version "2" is a string, and one block is repeated."""
    config = config_of(folder)
    assert config["base_model_name_or_path"]
    own = config.get("version") != "2"
    stored = safetensors.numpy.load_file(folder / "medusa_lm_head.safetensors")
    return authors_heads(stored, config["medusa_num_heads"], config["medusa_num_layers"], own)


def tgi_reader(folder):
    """TGI and LoRAX: the latter swaps adapters of a number 2 or more; version 2 has one block."""
    config = config_of(folder)
    assert config["base_model_name_or_path"]
    assert isinstance(config["version"], int | float)
    stored = safetensors.numpy.load_file(folder / "medusa_lm_head.safetensors")
    own = config["medusa_num_layers"] > 1 or f"0.{config['medusa_num_layers']}.weight" in stored
    assert own == (config["version"] < 2)
    assert own or config["medusa_num_layers"] == 1
    return authors_heads(stored, config["medusa_num_heads"], config["medusa_num_layers"], own)


def vllm_reader(folder):
    """vLLM: counts by parts of a key's name, biases if asked for, the first linear map for all heads if so."""
    config = config_of(folder)
    assert config["model_type"] == "medusa"
    assert config["architectures"] == ["MedusaModel"]
    heads = [config[key] for key in config if "num" in key and "heads" in key]
    layers = [config[key] for key in config if "num" in key and "layers" in key and "heads" not in key]
    assert len(heads) == len(layers) == 1
    (heads,), (layers,) = heads, layers
    assert (config["hidden_size"], config["vocab_size"], config["truncated_vocab_size"]) == (E, V, V)
    assert config["logit_scale"] == 1.0
    bias, shared = config.get("medusa_fc_bias", False), config.get("original_lm_head", False)
    files = sorted(folder.glob("*.safetensors"))
    stored = {}
    for file in files:
        for name, tensor in safetensors.numpy.load_file(file).items():
            stored[name.removeprefix("medusa_heads.")] = tensor
    wanted: dict[str, tuple[int, ...]] = {f"lm_heads.{h}.weight": (V, E) for h in range(1 if shared else heads)}
    for h, k in itertools.product(range(heads), range(layers)):
        wanted[f"blocks.{h}.layers.{k}.weight"] = (E, E)
        if bias:
            wanted[f"blocks.{h}.layers.{k}.bias"] = (E,)
    found = take(stored, wanted)
    return [
        ([(found[f"blocks.{h}.layers.{k}.weight"], found[f"blocks.{h}.layers.{k}.bias"]) for k in range(layers)],
         found[f"lm_heads.{0 if shared else h}.weight"])
        for h in range(heads)
    ]  # fmt: skip


def tensorrt_reader(folder):
    """TensorRT-LLM: a pickle of tensors, counts from its command line; every head has its linear map."""
    config = config_of(folder)
    loaded = torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    assert len({tensor.data_ptr() for tensor in loaded.values()}) == len(loaded)
    stored = {name: as_numpy(tensor) for name, tensor in loaded.items()}
    return authors_heads(stored, config["medusa_num_heads"], config["medusa_num_layers"], True)


def optimizer_reader(folder):
    """Model-Optimizer, and TensorRT-LLM for its checkpoints."""
    counts = config_of(folder)["medusa"]
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    return authors_heads(stored, counts["num_medusa_heads"], counts["num_medusa_layers"], True, "medusa_heads.")


READERS = {
    "specjax": original_reader, "original": original_reader, "tgi": tgi_reader, "vllm": vllm_reader,
    "tensorrt-llm": tensorrt_reader, "model-optimizer": optimizer_reader,
}  # fmt: skip


def as_numpy(tensor):
    bits = tensor.contiguous().view(torch.uint8).numpy()
    return bits.view(jnp.dtype(str(tensor.dtype).removeprefix("torch.")))


def same_bits(one, other):
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert one.tobytes() == other.tobytes()


def test_every_format_has_a_reader():
    """A new format needs a new statement of who reads it."""
    assert set(READERS) == set(FORMATS)


@pytest.mark.parametrize(("name", "case"), ALL)
def test_the_reader_finds_the_heads(tmp_path, name, case):
    """Every block, bias and map is at the head and depth where the loader looks; none is more, none fewer."""
    heads = heads_of(*CASES[case])
    write_heads(tmp_path, name, heads, HEAD)
    found = READERS[name](tmp_path)
    layers, own = CASES[case]
    assert len(found) == 3
    for h, (blocks, matrix) in enumerate(found):
        assert len(blocks) == layers
        for k, (weight, bias) in enumerate(blocks):
            same_bits(weight, heads.tensors[f"{h}.{k}.linear.weight"])
            same_bits(bias, heads.tensors[f"{h}.{k}.linear.bias"])
        if own:
            same_bits(matrix, heads.tensors[f"{h}.{layers}.weight"])
        elif name in ("vllm", "tensorrt-llm", "model-optimizer"):
            same_bits(matrix, HEAD.astype(jnp.bfloat16))
        else:
            assert matrix is None  # the loader takes the target's


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("name", "case"), ALL)
def test_the_way_back_is_bit_for_bit(tmp_path, name, case, kind):
    """Export and import: the same arrays, configuration and tree of choices; a second export has the same bytes."""
    heads = heads_of(*CASES[case], kind)
    write_heads(tmp_path / "a", name, heads, HEAD)
    back = read_heads(tmp_path / "a", name, HEAD)
    assert back.form == heads.form
    assert set(back.tensors) == set(heads.tensors)
    for there, tensor in heads.tensors.items():
        same_bits(back.tensors[there], tensor)
    write_heads(tmp_path / "b", name, back, HEAD)
    for file in ("config.json", FORMATS[name].file):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


# Traps.


def stored_in(folder, name):
    path = folder / FORMATS[name].file
    if path.suffix == ".pt":
        return {k: as_numpy(v) for k, v in torch.load(path, weights_only=True).items()}
    return safetensors.numpy.load_file(path)


def store(folder, name, tensors):
    path = folder / FORMATS[name].file
    if path.suffix == ".pt":
        torch.save({k: torch.from_numpy(v.astype(np.int32 if v.dtype == np.int32 else np.float32))
                    for k, v in tensors.items()}, path)  # fmt: skip
    else:
        safetensors.numpy.save_file(tensors, path)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "integers"])
def test_what_a_loader_would_skip_is_refused(tmp_path, name, fault):
    """vLLM leaves a head at random whose name it does not know (acceptance 0); here the tensor is named."""
    write_heads(tmp_path, name, heads_of(1, True, "float32"), HEAD)
    tensors = stored_in(tmp_path, name)
    last = sorted(tensors)[-1]
    if fault == "missing":
        del tensors[last]
    elif fault == "unknown":
        tensors["medusa_head.0.0.linear.weight"] = np.zeros((E, E), np.float32)
        last = "medusa_head.0.0.linear.weight"
    elif fault == "shape":
        tensors[last] = np.ascontiguousarray(tensors[last][:-1])
    else:
        tensors[last] = tensors[last].astype(np.int32)
    store(tmp_path, name, tensors)
    with pytest.raises(AssertionError):
        READERS[name](tmp_path)
    words = {"missing": "is missing", "unknown": "is not a tensor", "shape": "has shape", "integers": "stored as int32"}
    with pytest.raises(ValueError, match=words[fault]) as caught:
        read_heads(tmp_path, name, HEAD)
    assert last in str(caught.value)


@pytest.mark.parametrize("name", FORMATS)
def test_another_vocabulary_or_width_is_refused(tmp_path, name):
    """Heads for another target than the one given."""
    write_heads(tmp_path, name, heads_of(1, True), HEAD)
    for other in (np.zeros((V + 1, E), np.float32), np.zeros((V, E + 1), np.float32)):
        with pytest.raises(ValueError, match=r"shape|pass the target"):
            read_heads(tmp_path, name, other)


@pytest.mark.parametrize("name", ["vllm", "tensorrt-llm", "model-optimizer"])
def test_a_target_of_other_weights_is_refused(tmp_path, name):
    """A file of version 2 that repeats the target's map repeats that of this target."""
    write_heads(tmp_path, name, heads_of(1, False), HEAD)
    with pytest.raises(ValueError, match="is not the target's own linear map"):
        read_heads(tmp_path, name, HEAD + 1)


def test_biases_need_medusa_fc_bias(tmp_path):
    """vLLM drops them without it, so a folder that lacks it is refused, and ours has it."""
    write_heads(tmp_path, "vllm", heads_of(1, True), HEAD)
    assert config_of(tmp_path)["medusa_fc_bias"] is True
    changes: list[dict[str, Any]] = [{"medusa_fc_bias": False}, {"drop": ("medusa_fc_bias",)}]
    for change in changes:
        folders.edit(tmp_path, **change)
        with pytest.raises(AssertionError):
            vllm_reader(tmp_path)
        with pytest.raises(ValueError, match="medusa_fc_bias"):
            read_heads(tmp_path, "vllm", HEAD)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"truncated_vocab_size": V - 1}, "truncated_vocab_size is smaller"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"vocab_size": V + 1, "truncated_vocab_size": V + 1}, "vocab_size is 11, and the target's 10"),
    ],
)
def test_what_vllm_alone_can_say_is_refused(tmp_path, change, words):
    """A part of the vocabulary, scaled logits, another size."""
    write_heads(tmp_path, "vllm", heads_of(1, True), HEAD)
    folders.edit(tmp_path, **change)
    with pytest.raises(ValueError, match=words):
        read_heads(tmp_path, "vllm", HEAD)


def test_vllm_counts_by_parts_of_names(tmp_path):
    """`medusa_num_heads` will do, and of two such keys it is open which one counts."""
    write_heads(tmp_path, "vllm", heads_of(1, True), HEAD)
    folders.edit(tmp_path, drop=("num_heads",), medusa_num_heads=3)
    assert read_heads(tmp_path, "vllm", HEAD).form.num_heads == 3
    folders.edit(tmp_path, num_heads=3)
    with pytest.raises(ValueError, match="one key with 'num' and 'heads'"):
        read_heads(tmp_path, "vllm", HEAD)


def test_version_2_for_tgi_has_one_block(tmp_path):
    """Its loader asserts so; nothing is written."""
    with pytest.raises(
        ValueError, match=r"--format tgi: the heads have 2 blocks .* choose specjax, vllm, tensorrt-llm"
    ):
        write_heads(tmp_path / "out", "tgi", heads_of(2, False), HEAD)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("own", [True, False])
def test_the_authors_code_repeats_one_block(tmp_path, own):
    """[block] * n is one block: heads whose blocks differ are refused, and equal ones are stored each for itself."""
    with pytest.raises(ValueError, match="the blocks of head 0 differ"):
        write_heads(tmp_path / "out", "original", heads_of(2, own), HEAD)
    assert not (tmp_path / "out").exists()
    write_heads(tmp_path / "out", "original", heads_of(2, own, repeated=True), HEAD)
    for blocks, _ in original_reader(tmp_path / "out"):
        same_bits(blocks[0][0], blocks[1][0])


def test_a_pickle_of_shared_blocks_becomes_separate_arrays(tmp_path):
    """The authors' two blocks are one tensor in their pickle; ours are two, which can be trained apart."""
    heads = heads_of(2, True, "float32", repeated=True)
    write_heads(tmp_path, "tensorrt-llm", heads, HEAD)
    loaded = torch.load(tmp_path / "medusa_lm_head.pt", weights_only=True)
    for h, end in itertools.product(range(3), ("weight", "bias")):
        loaded[f"{h}.1.linear.{end}"] = loaded[f"{h}.0.linear.{end}"]
    torch.save(loaded, tmp_path / "medusa_lm_head.pt")
    back = read_heads(tmp_path, "tensorrt-llm", HEAD)
    for one, other in itertools.combinations(back.tensors.values(), 2):
        assert not np.shares_memory(one, other)
    same_bits(back.tensors["0.1.linear.weight"], heads.tensors["0.0.linear.weight"])


class _Runs:
    def __reduce__(self):
        return (pathlib.Path.touch, (pathlib.Path("executed"),))


def test_a_pickle_executes_nothing(tmp_path, monkeypatch):
    """Whatever else than tensors a file holds, it is refused and does not run."""
    monkeypatch.chdir(tmp_path)
    write_heads(tmp_path, "tensorrt-llm", heads_of(1, True), HEAD)
    torch.save({"0.0.linear.weight": _Runs()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="more than tensors"):
        read_heads(tmp_path, "tensorrt-llm", HEAD)
    assert not (tmp_path / "executed").exists()


def test_without_torch(tmp_path, monkeypatch):
    """Only the pickle needs it, both ways, and the message says so."""
    write_heads(tmp_path, "tensorrt-llm", heads_of(1, True), HEAD)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match="pip install torch"):
        read_heads(tmp_path, "tensorrt-llm", HEAD)
    with pytest.raises(ValueError, match="pip install torch"):
        write_heads(tmp_path / "out", "tensorrt-llm", heads_of(1, True), HEAD)
    write_heads(tmp_path / "other", "vllm", heads_of(1, True), HEAD)


def test_damaged_folders(tmp_path):
    """A cut file, a missing one, another format's configuration, impossible numbers: each named."""
    write_heads(tmp_path, "original", heads_of(1, True), HEAD)
    with pytest.raises(ValueError, match=r"config.json: medusa_fc_bias"):
        read_heads(tmp_path, "vllm", HEAD)
    with pytest.raises(ValueError, match="lacks 'medusa'"):
        read_heads(tmp_path, "model-optimizer", HEAD)
    faults: list[tuple[dict[str, Any], str]] = [
        ({"version": 3}, "version is 3"), ({"medusa_num_heads": 0}, "0 heads"), ({"version": "two"}, "two"),
    ]  # fmt: skip
    for change, words in faults:
        shutil.copytree(tmp_path, tmp_path / "changed", dirs_exist_ok=True)
        folders.edit(tmp_path / "changed", **change)
        with pytest.raises(ValueError, match=words):
            read_heads(tmp_path / "changed", "original", HEAD)
        shutil.rmtree(tmp_path / "changed")
    weights = tmp_path / "medusa_lm_head.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged"):
        read_heads(tmp_path, "original", HEAD)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="of another format"):
        read_heads(tmp_path, "original", HEAD)


# The job.


@pytest.fixture(scope="module")
def target():
    return specjax.load(TINY / "target")


def job(model, out, name, *more):
    export.main(["--model", str(model), "--out", str(out), "--format", name, *map(str, more)])
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory, target):
    """Heads of the tiny target, as `train.medusa` would leave them."""
    heads = heads_of(1, False, size=64, vocab=512)
    ours = {**OURS, "target": target_marks(target)}
    heads = dataclasses.replace(heads, form=dataclasses.replace(heads.form, ours=ours))
    folder = tmp_path_factory.mktemp("heads") / "model"
    write_heads(folder, "specjax", heads, np.asarray(head_matrix(target.params)).T)
    return folder


@pytest.mark.parametrize("name", ENGINES)
def test_there_and_back_by_the_command_line(tmp_path, trained, target, name):
    """`load_medusa` reads what came back: the same bytes of weights, the same parameters, the same tree."""
    out = job(trained, tmp_path / "engine", name, "--target", TINY / "target")
    assert json.loads((out / "export.json").read_text())["options"]["format"] == name
    back = job(out, tmp_path / "back", "specjax", "--source-format", name, "--target", TINY / "target")
    assert (back / "medusa_lm_head.safetensors").read_bytes() == (trained / "medusa_lm_head.safetensors").read_bytes()
    assert config_of(back) == config_of(trained)
    found, first = (specjax.load_medusa(folder, target) for folder in (back, trained))
    assert found.choices == first.choices == ((0,), (1,), (0, 0))
    for leaf in first.params:
        same_bits(np.asarray(found.params[leaf]), np.asarray(first.params[leaf]))


def test_head_k_of_an_export_guesses_what_ours_does(tmp_path, trained, target, monkeypatch):
    """From the features at t head k says the token at t + 2 + k in either: vLLM's arithmetic gives our logits."""
    monkeypatch.setitem(vllm_reader.__globals__, "E", 64)
    monkeypatch.setitem(vllm_reader.__globals__, "V", 512)
    found = vllm_reader(job(trained, tmp_path / "out", "vllm", "--target", TINY / "target"))
    adapter = specjax.load_medusa(trained, target)
    hidden = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)
    matrix = head_matrix(target.params)
    ours = medusa_logits(adapter.heads, medusa_features(adapter.heads, adapter.params, jnp.asarray(hidden)), matrix)
    for k, (blocks, head) in enumerate(found):
        x = hidden.astype(np.float64)
        for weight, bias in blocks:
            z = x @ weight.astype(np.float64).T + bias.astype(np.float64)
            x = x + z / (1 + np.exp(-z))
        np.testing.assert_allclose(ours[:, k], x @ head.astype(np.float64).T, rtol=1e-4, atol=1e-4)


def test_a_draft_is_copied_with_all_that_engines_read(tmp_path):
    """Every tensor in its bits, tokenizer and sampling defaults in theirs; transformers' own loader takes it."""
    source, out = TINY / "draft", tmp_path / "out"
    job(source, out, "hf", "--target", TINY / "target")
    ours, theirs = (safetensors.numpy.load_file(folder / "model.safetensors") for folder in (out, source))
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        same_bits(ours[name], tensor)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / file).read_bytes() == (source / file).read_bytes()
    job(source, out, "hf")  # again: an export may be replaced
    out = job(source, tmp_path / "again", "hf")
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()


def test_a_draft_of_other_tokens_is_refused(tmp_path, capsys):
    """vLLM and TensorRT-LLM give a draft the target's tokens: other sizes and orders would be garbage."""
    with pytest.raises(ValueError, match="has 304 tokens and the target target 320"):
        job(folders.draft(), tmp_path / "out", "hf", "--target", folders.target())
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        job(folders.wordless(), tmp_path / "out", "hf")
    permuted = tmp_path / "permuted"
    shutil.copytree(TINY / "draft", permuted)
    words = json.loads((permuted / "tokenizer.json").read_text())
    table = words["model"]["vocab"]
    one, other = sorted(table, key=table.get)[100:102]
    table[one], table[other] = table[other], table[one]
    (permuted / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ValueError, match="has other tokens than the target"):
        job(permuted, tmp_path / "out", "hf", "--target", TINY / "target")
    assert not (tmp_path / "out").exists()
    short = tmp_path / "short"
    shutil.copytree(TINY / "draft", short)
    folders.edit(short, max_position_embeddings=128)
    job(short, tmp_path / "out", "hf", "--target", TINY / "target")
    assert "the draft reads 128 positions and the target 256" in capsys.readouterr().out


def test_heads_of_another_target_are_refused(tmp_path, trained):
    """One of the same shape whose weights differ: known by the marks."""
    other = tmp_path / "other"
    shutil.copytree(TINY / "target", other)
    tensors = safetensors.numpy.load_file(other / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    safetensors.numpy.save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="was trained for another target"):
        job(trained, tmp_path / "out", "vllm", "--target", other)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--format", "vllm"), "--target is missing"),
        (("--format", "hf", "--out", "runs/my-eagle-3"), "takes a folder with 'eagle' in its path"),
        (("--format", "hf", "--source-format", "vllm"), "is for Medusa heads"),
        (("--format", "hf", "--out", str(TINY / "target")), "holds something that no export made"),
        (("--format", "gguf"), "invalid choice: 'gguf'"),
    ],
)
def test_usage(tmp_path, capsys, more, words):
    """What cannot go well is said before anything is read."""
    with pytest.raises(SystemExit):
        export.main(["--model", str(TINY / "draft"), "--out", str(tmp_path / "out"), *more])
    assert words in capsys.readouterr().err


def test_an_export_is_replaced_whole(tmp_path, trained):
    """No weights of an earlier format stay: engines read whatever weights they find; the source is never written."""
    out = tmp_path / "out"
    for name in ("tensorrt-llm", "vllm", "tgi"):
        job(trained, out, name, "--target", TINY / "target")
        assert sorted(path.name for path in out.iterdir()) == sorted(["config.json", "export.json", FORMATS[name].file])
    with pytest.raises(ValueError, match="is what is read"):
        job(out, out, "vllm", "--source-format", "tgi", "--target", TINY / "target")
