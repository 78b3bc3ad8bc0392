"""Two processes with four devices each: what one gives, saved for any other, and an end when one of them dies."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import folders
import numpy as np
import pytest

import specjax
from specjax.commands import processes
from tests import in_processes, trained
from tests.train_on_meshes import TOLERANCE
from train import pretrain

ROOT = pathlib.Path(__file__).parent.parent


def environment(devices: int) -> dict[str, str]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    paths = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]


def losses(folder: pathlib.Path) -> list[float]:
    lines = folder / "metrics.jsonl"
    found = [json.loads(line) for line in lines.read_text().splitlines()[:4]] if lines.exists() else []
    return [line["loss"] for line in found if "loss" in line]


def test_two_processes(tmp_path, capsys):
    """Tokens and losses are those of one process; only the first prints; each ends when the other is killed."""
    target = folders.write(folders.random_llama(1, initializer_range=0.5), "processes")
    out, address = tmp_path / "two", f"localhost:{free_port()}"
    given = [str(out), str(trained.text()), str(target), address]
    files = [tmp_path / f"{name}.{n}" for n in range(2) for name in ("stdout", "stderr")]
    both = []
    for n in range(2):
        with open(files[2 * n], "w") as told, open(files[2 * n + 1], "w") as complained:
            command = [sys.executable, "tests/in_processes.py", *given, str(n)]
            both.append(subprocess.Popen(command, stdout=told, stderr=complained, cwd=ROOT, env=environment(4)))
    try:
        # Steps beyond the checkpoint of step 4 that nobody saves: they are lost, and no more.
        _wait(lambda: _steps(out) >= 5 or any(p.poll() is not None for p in both), 300)
        assert [p.poll() for p in both] == [None, None], "".join(file.read_text() for file in files)
        both[1].send_signal(signal.SIGKILL)
        began = time.monotonic()
        assert both[0].wait(60) == 2, files[1].read_text()
        assert time.monotonic() - began < 30
    finally:
        for process in both:
            process.kill()
            process.wait()
    message = files[1].read_text()
    assert "process 1 of 2 is gone" in message and "--num-processes 1" in message, message
    assert "Check failure stack trace" not in message

    told, silent = files[0].read_text(), files[2].read_text()
    assert silent == ""
    model = specjax.load(target)
    wanted = specjax.generate(
        model, in_processes.PROMPTS, proposer=specjax.NGram(3), max_new_tokens=8, temperature=[1.0, 0.0, 0.7]
    )
    assert json.dumps(wanted.tokens) in told.splitlines()
    saved = specjax.load(out / "saved")
    np.testing.assert_array_equal(saved.params["embedding"], model.params["embedding"])

    # One process with one device goes on from the last checkpoint, and its run is one that was never elsewhere.
    common = ["--data", str(trained.text()), *in_processes.LANGUAGE, "--steps", "100000"]
    saved_step = max(int(p.name) for p in (out / "state").iterdir() if p.name.isdecimal())
    pretrain.main([*common, "--out", str(out), "--stop-at", str(saved_step + 1)])
    assert f"resumed {out} at step {saved_step} of" in capsys.readouterr().out
    pretrain.main([*common, "--out", str(tmp_path / "one"), "--stop-at", "4"])
    np.testing.assert_allclose(losses(out)[:4], losses(tmp_path / "one"), rtol=TOLERANCE)


def _steps(out: pathlib.Path) -> int:
    lines = out / "metrics.jsonl"
    return len(lines.read_text().splitlines()) if lines.exists() else 0


def _wait(ready, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < ends, "nothing happened"
        time.sleep(0.2)


@pytest.mark.parametrize("number", [0, 1])
def test_nobody_comes(number):
    """A clear error, soon."""
    address = f"localhost:{free_port()}"
    code = f"from specjax.commands.processes import join; join({address!r}, 2, {number}, timeout=3)"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment(1))
    assert done.returncode == 2 and time.monotonic() - began < 60
    assert f"the 2 processes did not come together at {address} within 3 s" in done.stderr
    assert "Check failure stack trace" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--coordinator", "localhost"], "--coordinator localhost must look like HOST:PORT"),
        (["--coordinator", "localhost:1", "--process-id", "0"], "--coordinator localhost:1 needs --num-processes"),
        (["--coordinator", "localhost:1", "--num-processes", "2", "--process-id", "2"], "--process-id 2 of"),
        (["--num-processes", "2"], "add it"),
        (["--mesh", "rows=2"], "must look like data=2,model=4"),
        (["--mesh", "data=2,fsdp=4"], "data=2 times fsdp=4 times model=1 is not the number of devices, 1"),
    ],
)
def test_what_cannot_be(options, message, tmp_path, capsys, monkeypatch):
    """Told before anything is read."""
    for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises((SystemExit, ValueError)) as found:
        pretrain.main(["--data", str(tmp_path), "--out", str(tmp_path), *options])
    assert message in str(found.value) + capsys.readouterr().err
    with pytest.raises(ValueError, match="JAX_PROCESS_ID=two"):
        monkeypatch.setenv("JAX_PROCESS_ID", "two")
        processes.join("localhost:1", 2, None)
