"""Damaged files of a run: a flipped bit, a file cut short or emptied, and a second run."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import shutil
import sys
import threading

import numpy as np
import pytest
import trained
from test_loop import Toy, exported, settings
from trained import metrics

from specjax.training import dataset
from specjax.training.checkpoints import saved_steps
from specjax.training.corpus import Source
from specjax.training.jobs import distill, medusa, pretrain
from specjax.training.jobs.distill_options import DistillOptions, annealing
from specjax.training.jobs.generate import Request
from specjax.training.lock import alone
from specjax.training.loop import fit
from specjax.training.tokenising import prepare

DAMAGES = {
    "a flipped bit": lambda data: flipped(data, len(data) // 2),
    "cut short": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
}


def flipped(data: bytes, byte: int, bit: int = 3) -> bytes:
    return data[:byte] + bytes([data[byte] ^ (1 << bit)]) + data[byte + 1 :]


def damage(path: pathlib.Path, how: str) -> None:
    path.write_bytes(DAMAGES[how](path.read_bytes()))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of the toy job without any disturbance."""
    out = tmp_path_factory.mktemp("toy") / "run"
    fit(Toy(), settings(out))
    return out


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run with the checkpoints of the steps 3, 6 and 9 of 12."""
    out = tmp_path_factory.mktemp("toy") / "half"
    fit(Toy(), settings(out, stop_at=9))
    assert saved_steps(out) == [3, 6, 9]
    return out


def files(folder: pathlib.Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, half, finished, how, capsys):
    """Whatever file of the newest one is damaged, the run goes on from the one before, to the same
    bytes."""
    names = files(half / "state" / "9")
    assert {"sha256.json", "metrics.jsonl", "default/_METADATA"} <= set(names)
    # A bit in each file; for the slower damages one file of each kind.
    kinds = {pathlib.Path(name).name[:5]: name for name in names}
    for number, name in enumerate(names if how == "a flipped bit" else sorted(kinds.values())):
        out = tmp_path / str(number)
        shutil.copytree(half, out)
        path = out / "state" / "9" / name
        if not path.stat().st_size:  # such as commit_success.txt
            path.unlink()
        else:
            damage(path, how)
        fit(Toy(), settings(out))
        said = capsys.readouterr().out
        named = path.name if name == "sha256.json" else f"{path}"  # another hash, or another file
        assert named in said and "goes on from step 6" in said, (name, said)
        assert exported(out).tobytes() == exported(finished).tobytes()
        assert metrics(out) == metrics(finished)
        assert files(out / "broken" / "9") and saved_steps(out) == [6, 9, 12]


def test_every_bit_of_a_checkpoint_counts(tmp_path, half, capsys):
    """Forty random bits, each in a copy: each is noticed."""
    names = [n for n in files(half / "state" / "9") if (half / "state" / "9" / n).stat().st_size]
    drawn = np.random.default_rng(0)
    out = tmp_path / "run"
    shutil.copytree(half, out)
    for _ in range(40):
        path = out / "state" / "9" / names[drawn.integers(len(names))]
        data = path.read_bytes()
        path.write_bytes(flipped(data, drawn.integers(len(data)), drawn.integers(8)))
        fit(Toy(), settings(out, stop_at=6))  # restores step 6, and takes no step
        assert path.name in capsys.readouterr().out
        shutil.move(out / "broken" / "9", out / "state" / "9")
        path.write_bytes(data)
    fit(Toy(), settings(out, stop_at=9))
    assert "broken" not in capsys.readouterr().out


def test_no_whole_checkpoint_is_refused(tmp_path, half):
    """The error names a file of each; nothing is moved."""
    shutil.copytree(half, tmp_path / "run")
    for step in (3, 6, 9):
        damage(tmp_path / "run" / "state" / str(step) / "default" / "_METADATA", "cut short")
    with pytest.raises(ValueError, match=r"no checkpoint in .*state is whole:(.|\n)*/9/default/_M"):
        fit(Toy(), settings(tmp_path / "run"))
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
        fit(Toy(), settings(out))
        said = capsys.readouterr().out
        assert f"resumed {out} at step {6 if name == 'killed' else 9}" in said
        assert (f"{out / 'state' / '9'} has no sha256.json") in said
        assert ("cannot be verified" in said) == (name == "older")
        assert exported(out).tobytes() == exported(finished).tobytes()
    out = tmp_path / "broken"
    shutil.copytree(half, out)
    for step in (3, 6, 9):
        (out / "state" / str(step) / "sha256.json").unlink()
    damage(out / "state" / "9" / "default" / "_METADATA", "empty")
    with pytest.raises(ValueError, match=r"state/9 cannot be restored: (.|\n)*delete this folder"):
        fit(Toy(), settings(out))


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
        fit(Toy(), settings(tmp_path / "run.json"))
    lost = DistillOptions(
        data=(), target="", out=str(tmp_path / "run.json"), loss="total-variation"
    )
    with pytest.raises(ValueError, match=r"run\.json cannot be read"):
        annealing(lost)
    fit(Toy(), settings(tmp_path / "run.json", accept_changes=True))
    assert json.loads((tmp_path / "run.json" / "run.json").read_text())["inputs"]
    fit(Toy(), settings(tmp_path / "metrics.jsonl"))
    assert "metrics.jsonl was damaged; its lines are those of" in capsys.readouterr().out
    for name in ("run.json", "metrics.jsonl"):
        assert exported(tmp_path / name).tobytes() == exported(finished).tobytes()
        assert metrics(tmp_path / name) == metrics(finished)


def test_a_damaged_corpus_is_refused(tmp_path):
    """The error names the file and what to delete, which makes it again."""
    source = Source((str(trained.text()),))
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


# --- one run in a folder ----------------------------------------------------------------------


def test_a_second_run_in_a_folder_is_refused(tmp_path):
    """It is refused at once and by name, also by the jobs, and the first one goes on."""
    seen = []

    def second():
        try:
            fit(Toy(), settings(tmp_path))
        except ValueError as error:
            seen.append(str(error))

    def before():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    fit(Toy(before=before), settings(tmp_path, steps=3))
    assert len(seen) == 1 and f"--out {tmp_path} (process {os.getpid()} on " in seen[0]
    assert "choose another --out" in seen[0]
    fit(Toy(), settings(tmp_path, steps=6))  # the lock went with the run
    (tmp_path / "run.lock").write_text("process 1 on elsewhere")
    fit(Toy(), settings(tmp_path, steps=9))  # a file is no lock
    given = ["--target", "nowhere", "--data", str(trained.text()), "--out", str(tmp_path)]
    asked = {pretrain: given[2:], distill: given, medusa: given}
    with alone(tmp_path):
        for job, arguments in asked.items():
            seen.clear()

            def refused(job=job, arguments=arguments):
                with pytest.raises(ValueError, match="another run is writing to"):
                    job.main(arguments)
                seen.append(job)

            thread = threading.Thread(target=refused)
            thread.start()
            thread.join()
            assert seen == [job]


# --- what a run depends on --------------------------------------------------------------------


def test_another_initial_model_is_refused(tmp_path):
    """The content of `--initial` is an input of the run, for each job that takes one."""
    initial = tmp_path / "initial"
    shutil.copytree(trained.target(), initial)
    command = trained.command(
        tmp_path / "run", "--initial", str(initial), "--tokenizer", str(initial / "tokenizer.json"),
        "--steps", "2", "--stop-at", "1",
    )  # fmt: skip
    pretrain.main(command)
    weights = initial / "model.safetensors"
    weights.write_bytes(flipped(weights.read_bytes(), weights.stat().st_size - 2, 1))
    with pytest.raises(ValueError, match="the initial has changed: sha256"):
        pretrain.main(command)
    hashed = dataset.initial_hash(str(initial))
    (initial / "medusa_lm_head.safetensors").write_bytes(b"heads")
    assert dataset.initial_hash(str(initial)) != hashed and dataset.initial_hash(None) == {}


# --- streams that close -----------------------------------------------------------------------


class Gone:
    """A stdout whose reader goes after the first evaluation."""

    def __init__(self):
        self.lines = 0

    def write(self, text):
        self.lines += "distance" in text
        if self.lines > 1:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        return len(text)

    def flush(self):
        pass


def test_a_stdout_that_closes_saves_first(tmp_path, finished, monkeypatch):
    """The step is saved, the error says so, and the run resumes to the same bytes."""
    with monkeypatch.context() as context:
        context.setattr(sys, "stdout", Gone())
        message = r"the output has closed \(.*Broken pipe\); saved at step 6 of 12"
        with pytest.raises(OSError, match=message):
            fit(Toy(), settings(tmp_path, save_every=100))
    assert saved_steps(tmp_path) == [6]
    fit(Toy(), settings(tmp_path))
    assert exported(tmp_path).tobytes() == exported(finished).tobytes()
