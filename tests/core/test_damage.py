"""Damaged files of a run: a flipped bit, a file cut short or emptied."""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import pytest
from kills import same
from quadratic_job import Quadratic, train

from specjax.training import dataset
from specjax.training.checkpoints import Checkpoints, _whole, saved_steps
from specjax.training.corpus import Source
from specjax.training.jobs import pretrain
from specjax.training.jobs.distill import DistillOptions, annealing
from specjax.training.jobs.generate import Request
from specjax.training.tokenising import prepare

TINY = pathlib.Path(__file__).parents[2] / "checkpoints" / "tiny" / "target"
DAMAGES = {
    "a flipped bit": lambda data: flipped(data, len(data) // 2),
    "cut short": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
}


def flipped(data: bytes, byte: int, bit: int = 3) -> bytes:
    return data[:byte] + bytes([data[byte] ^ (1 << bit)]) + data[byte + 1 :]


def text(folder: pathlib.Path) -> pathlib.Path:
    """A folder with four small texts."""
    for number in range(4):
        (folder / "text").mkdir(exist_ok=True)
        (folder / "text" / f"{number}.txt").write_text(f"{number} the cat sat on the mat " * 40)
    return folder / "text"


def damage(path: pathlib.Path, how: str) -> None:
    path.write_bytes(DAMAGES[how](path.read_bytes()))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of ten numbers without any disturbance."""
    out = tmp_path_factory.mktemp("quadratic") / "run"
    train(out)
    return out


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run with the checkpoints of the steps 3, 6 and 9 of 12."""
    out = tmp_path_factory.mktemp("quadratic") / "half"
    train(out, stop_at=9)
    assert saved_steps(out) == [3, 6, 9]
    return out


def files(folder: pathlib.Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def newest(out: pathlib.Path) -> int | None:
    """The step from which a run would go on."""
    made = Checkpoints(out)
    made.close()
    return made.step


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, half, how, capsys):
    """Whatever file of the newest one is damaged, a run would go on from the one before."""
    out = tmp_path / "run"
    shutil.copytree(half, out)
    names = files(out / "state" / "9")
    assert {"sha256.json", "metrics.jsonl", "default/_METADATA"} <= set(names)
    for name in names:
        path = out / "state" / "9" / name
        whole = path.read_bytes()
        if not whole:  # such as commit_success.txt
            path.unlink()
        else:
            damage(path, how)
        assert newest(out) == 6
        said = capsys.readouterr().out
        named = path.name if name == "sha256.json" else f"{path}"  # another hash, or another file
        assert named in said and "goes on from step 6" in said, (name, said)
        shutil.move(out / "broken" / "9", out / "state" / "9")
        path.write_bytes(whole)
    assert newest(out) == 9 and not capsys.readouterr().out


@pytest.mark.parametrize("name", ["default/_METADATA", "metrics.jsonl", "sha256.json"])
def test_a_run_goes_on_from_the_checkpoint_before(tmp_path, half, finished, name):
    """To the same bytes; the broken checkpoint stays beside it."""
    out = tmp_path / "run"
    shutil.copytree(half, out)
    damage(out / "state" / "9" / name, "a flipped bit")
    train(out)
    assert same(out, finished)
    assert files(out / "broken" / "9") and saved_steps(out) == [6, 9, 12]


def test_every_bit_of_a_checkpoint_counts(tmp_path, half, capsys):
    """Three hundred random bits, one after the other: each is noticed."""
    names = [n for n in files(half / "state" / "9") if (half / "state" / "9" / n).stat().st_size]
    drawn = np.random.default_rng(0)
    out = tmp_path / "run"
    shutil.copytree(half, out)
    for _ in range(300):
        path = out / "state" / "9" / names[drawn.integers(len(names))]
        data = path.read_bytes()
        path.write_bytes(flipped(data, drawn.integers(len(data)), drawn.integers(8)))
        assert _whole(out) == 6
        assert path.name in capsys.readouterr().out
        shutil.move(out / "broken" / "9", out / "state" / "9")
        path.write_bytes(data)
    assert _whole(out) == 9 and not capsys.readouterr().out


def test_no_whole_checkpoint_is_refused(tmp_path, half):
    """The error names a file of each; nothing is moved."""
    shutil.copytree(half, tmp_path / "run")
    for step in (3, 6, 9):
        damage(tmp_path / "run" / "state" / str(step) / "default" / "_METADATA", "cut short")
    with pytest.raises(ValueError, match=r"no checkpoint in .*state is whole:(.|\n)*/9/default/_M"):
        train(tmp_path / "run")
    assert saved_steps(tmp_path / "run") == [3, 6, 9]


def test_a_checkpoint_without_hashes(tmp_path, half, finished, capsys):
    """A run that was killed before it hashed the newest goes on from the one before; a folder of
    an earlier version goes on, and says that nothing was verified."""
    for name, steps in (("killed", [9]), ("older", [3, 6, 9])):
        out = tmp_path / name
        shutil.copytree(half, out)
        for step in steps:
            (out / "state" / str(step) / "sha256.json").unlink()
            (out / "state" / str(step) / "metrics.jsonl").unlink()
            data = out / "state" / str(step) / "data.json"
            assert json.loads(data.read_text()) == {"next_index": step}
            data.unlink()
        train(out)
        said = capsys.readouterr().out
        assert f"resumed {out} at step {6 if name == 'killed' else 9}" in said
        assert (f"{out / 'state' / '9'} has no sha256.json") in said
        assert ("cannot be verified" in said) == (name == "older")
        assert same(out, finished)
    out = tmp_path / "broken"
    shutil.copytree(half, out)
    for step in (3, 6, 9):
        (out / "state" / str(step) / "sha256.json").unlink()
    damage(out / "state" / "9" / "default" / "_METADATA", "empty")
    with pytest.raises(ValueError, match=r"state/9 cannot be restored: (.|\n)*delete this folder"):
        train(out)


@pytest.mark.parametrize("how", ["cut short", "empty", "no JSON", "missing"])
def test_the_records_of_a_run(tmp_path, half, finished, how, capsys):
    """`run.json` is needed to compare the options, so the run is refused; `metrics.jsonl` comes
    back from the checkpoint."""
    for name in ("run.json", "metrics.jsonl"):
        out = tmp_path / name
        shutil.copytree(half, out)
        if how == "missing":
            (out / name).unlink()
        elif how == "no JSON":
            (out / name).write_text("[1]\n" * 3)
        else:
            damage(out / name, how)
    with pytest.raises(ValueError, match=r"run\.json cannot be read .*--accept-changes"):
        train(tmp_path / "run.json")
    lost = DistillOptions(
        data=(), target="", out=str(tmp_path / "run.json"), loss="total-variation"
    )
    with pytest.raises(ValueError, match=r"run\.json cannot be read"):
        annealing(lost)
    train(tmp_path / "run.json", accept_changes=True)
    assert json.loads((tmp_path / "run.json" / "run.json").read_text())["inputs"]
    train(tmp_path / "metrics.jsonl")
    assert "metrics.jsonl was damaged; its lines are those of" in capsys.readouterr().out
    for name in ("run.json", "metrics.jsonl"):
        assert same(tmp_path / name, finished)


def test_a_damaged_corpus_is_refused(tmp_path):
    """The error names the file and what to delete, which makes it again."""
    source = Source((str(text(tmp_path)),))
    tmp_path = tmp_path / "corpus"
    prepare(source, tmp_path, 300, None)
    for name in ("corpus.json", "tokenizer.json", "train.bin", "held_out.bin"):
        whole = (tmp_path / name).read_bytes()
        for how in DAMAGES if name != "corpus.json" else ("cut short", "empty"):
            damage(tmp_path / name, how)
            with pytest.raises(ValueError, match=rf"{name} .*: delete {tmp_path} to tokenise"):
                prepare(source, tmp_path, 300, None)
        (tmp_path / name).write_bytes(whole)
    prepare(source, tmp_path, 300, None)


def test_a_damaged_dataset(tmp_path):
    """A reader names the shard; the job that wrote it writes it again; a description that is no
    JSON is named."""
    arrays = {
        "tokens": np.arange(8, dtype=np.int32).reshape(2, 4),
        "prompt_length": np.array([1, 2], np.int32),
        "length": np.array([4, 4], np.int32),
    }
    shard = tmp_path / "00000.safetensors"
    dataset.save_shard(shard, arrays)
    whole = shard.read_bytes()
    (tmp_path / "dataset.json").write_text("{")
    for how in DAMAGES:
        shard.write_bytes(flipped(whole, len(whole) - 9) if how == "a flipped bit" else whole)
        if how != "a flipped bit":
            damage(shard, how)
        with pytest.raises(ValueError, match=r"00000\.safetensors .*: delete it, and run"):
            dataset.read(tmp_path)
    for text in ("{", "{}", "[]"):
        (tmp_path / "dataset.json").write_text(text)
        with pytest.raises(ValueError, match=r"dataset\.json"):
            dataset.read_masked(tmp_path, {})
    request = Request({}, 2, 2, 4, {}, 0, 0, "")
    (tmp_path / "dataset.json").write_text("")
    with pytest.raises(ValueError, match=r"dataset\.json is not JSON"):
        dataset.write(tmp_path, request, None, None, lambda n: [], None)


# --- what a run depends on --------------------------------------------------------------------


def test_another_initial_model_is_another_input(tmp_path):
    """The content of `--initial` is an input of the run, which refuses another one."""
    initial, words = tmp_path / "initial", TINY / "tokenizer.json"
    shutil.copytree(TINY, initial)
    config = json.loads((TINY / "config.json").read_text())
    options = pretrain.PretrainOptions(
        data=(str(text(tmp_path)),), out=str(tmp_path / "run"), initial=str(initial),
        tokenizer=str(words), sequence_length=32, hidden_size=config["hidden_size"],
        mlp_size=config["intermediate_size"], num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"], num_kv_heads=config["num_key_value_heads"],
    )  # fmt: skip
    before = dict(pretrain.make_job(options).inputs)
    weights = initial / "model.safetensors"
    weights.write_bytes(flipped(weights.read_bytes(), weights.stat().st_size - 2, 1))
    after = dict(pretrain.make_job(options).inputs)
    assert {name for name in before if before[name] != after[name]} == {"initial"}
    train(tmp_path / "run", Quadratic(inputs=before), stop_at=1)
    with pytest.raises(ValueError, match="the initial has changed: sha256"):
        train(tmp_path / "run", Quadratic(inputs=after))
    hashed = dataset.initial_hash(str(initial))
    (initial / "medusa_lm_head.safetensors").write_bytes(b"heads")
    assert dataset.initial_hash(str(initial)) != hashed and dataset.initial_hash(None) == {}
