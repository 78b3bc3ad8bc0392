"""The job `train.export`: round trips on the command line, and what it refuses."""

import dataclasses
import json
import pathlib
import shutil

import folders
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from engines import OURS, config_of, heads_of, same_bits, vllm_reader

import specjax
from specjax.methods.medusa.drafter import target_marks
from specjax.methods.medusa.engines import HEAD_FORMATS as FORMATS
from specjax.methods.medusa.exports import write_heads
from specjax.methods.medusa.network import medusa_hidden, medusa_logits
from specjax.models.transformer import head_matrix
from specjax.training.jobs import export

TINY = pathlib.Path(__file__).parents[2] / "checkpoints" / "tiny"
ENGINES = [name for name in FORMATS if name != "specjax"]


@pytest.fixture(scope="module")
def target():
    return specjax.load(TINY / "target")


def job(model, out, name, *more):
    export.main(["--model", str(model), "--out", str(out), "--format", name, *map(str, more)])
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory, target):
    """Heads of the tiny target in the form that `train.medusa` leaves them in."""
    heads = heads_of(1, False, size=64, vocab=512)
    ours = {**OURS, "target": target_marks(target)}
    heads = dataclasses.replace(heads, form=dataclasses.replace(heads.form, ours=ours))
    folder = tmp_path_factory.mktemp("heads") / "model"
    write_heads(folder, "specjax", heads, np.asarray(head_matrix(target.params)).T)
    return folder


@pytest.mark.parametrize("name", ENGINES)
def test_there_and_back_by_the_command_line(tmp_path, trained, target, name):
    """`load_medusa` reads the result: the same weights in bytes, the same parameters, the same
    tree."""
    out = job(trained, tmp_path / "engine", name, "--target", TINY / "target")
    assert json.loads((out / "export.json").read_text())["options"]["format"] == name
    back = job(
        out, tmp_path / "back", "specjax", "--source-format", name, "--target", TINY / "target"
    )
    assert (back / "medusa_lm_head.safetensors").read_bytes() == (
        trained / "medusa_lm_head.safetensors"
    ).read_bytes()
    assert config_of(back) == config_of(trained)
    loaded, first = (specjax.load_medusa(folder, target) for folder in (back, trained))
    assert loaded.choices == first.choices == ((0,), (1,), (0, 0))
    for leaf in first.params:
        same_bits(np.asarray(loaded.params[leaf]), np.asarray(first.params[leaf]))


def test_head_k_of_an_export_predicts_what_ours_does(tmp_path, trained, target, monkeypatch):
    """From the hidden state at t, head k predicts the token at t + 2 + k in both: vLLM's formula
    gives our logits."""
    monkeypatch.setitem(vllm_reader.__globals__, "E", 64)
    monkeypatch.setitem(vllm_reader.__globals__, "V", 512)
    exported = vllm_reader(job(trained, tmp_path / "out", "vllm", "--target", TINY / "target"))
    adapter = specjax.load_medusa(trained, target)
    hidden = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)
    matrix = head_matrix(target.params)
    ours = medusa_logits(
        adapter.heads, medusa_hidden(adapter.heads, adapter.params, jnp.asarray(hidden)), matrix
    )
    for k, (blocks, head) in enumerate(exported):
        x = hidden.astype(np.float64)
        for weight, bias in blocks:
            z = x @ weight.astype(np.float64).T + bias.astype(np.float64)
            x = x + z / (1 + np.exp(-z))
        np.testing.assert_allclose(ours[:, k], x @ head.astype(np.float64).T, rtol=1e-4, atol=1e-4)


def test_a_draft_is_copied_with_all_that_engines_read(tmp_path):
    """Tensors, tokenizer and sampling defaults are copied exactly, and transformers can load the
    copy."""
    source, out = TINY / "draft", tmp_path / "out"
    job(source, out, "hf", "--target", TINY / "target")
    ours, theirs = (
        safetensors.numpy.load_file(folder / "model.safetensors") for folder in (out, source)
    )
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        same_bits(ours[name], tensor)
    for file in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        assert (out / file).read_bytes() == (source / file).read_bytes()
    job(source, out, "hf")  # an export may be replaced
    out = job(source, tmp_path / "again", "hf")
    assert (out / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()


def test_a_draft_of_other_tokens_is_refused(tmp_path, capsys):
    """vLLM and TensorRT-LLM feed a draft the target's token ids, so another vocabulary would
    give garbage."""
    with pytest.raises(ValueError, match="has 304 tokens and the target 'target' 320"):
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
    """Heads of the same shape for other weights are recognised by their fingerprints."""
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
        (("--format", "hf", "--out", str(TINY / "target")), "has contents that no export wrote"),
        (("--format", "gguf"), "invalid choice 'gguf' for argument '--format'"),
    ],
)
def test_usage(tmp_path, capsys, more, words):
    """Wrong options are refused before anything is read."""
    with pytest.raises(SystemExit):
        export.main(["--model", str(TINY / "draft"), "--out", str(tmp_path / "out"), *more])
    assert words in capsys.readouterr().err


def test_an_export_is_replaced_whole(tmp_path, trained):
    """No weights of an earlier format stay, since engines read any weights; the source is never
    written."""
    out = tmp_path / "out"
    for name in ("tensorrt-llm", "vllm", "tgi"):
        job(trained, out, name, "--target", TINY / "target")
        assert sorted(path.name for path in out.iterdir()) == sorted(
            ["config.json", "export.json", FORMATS[name].file]
        )
    with pytest.raises(ValueError, match="is the folder that is read"):
        job(out, out, "vllm", "--source-format", "tgi", "--target", TINY / "target")
