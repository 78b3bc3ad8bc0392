"""Two processes with two devices each train as one device does, and each ends when the other
dies."""

import json
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import in_processes
import numpy as np
import pytest
from several_devices import ROOT, environment

import specjax
from specjax.parallel import processes
from specjax.training.jobs import distill, drafter, medusa, pretrain
from specjax.training.loop import mesh_of_run

TOLERANCE = 1e-4
"""Relative tolerance of a loss, whose sums are taken in another order. (Seen here: 2e-7, half of
it rounding.)"""


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("", 0))
        return bound.getsockname()[1]


def metrics(folder: pathlib.Path, last: int = 4) -> list[dict]:
    path = folder / "metrics.jsonl"
    # A process may still be writing the last line.
    lines = map(
        json.loads, path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    )
    return [line for line in lines if line["step"] <= last]


def same(lines: list[dict], wanted: list[dict]) -> None:
    assert [set(line) for line in lines] == [set(line) for line in wanted]
    assert {"loss", "grad_norm"} < {name for line in lines for name in line}
    for line, other in zip(lines, wanted, strict=True):
        for name in line:
            if "loss" in name or name in ("step", "grad_norm", "held_out_kl"):
                np.testing.assert_allclose(
                    line[name], other[name], rtol=TOLERANCE, atol=2e-6, err_msg=f"{name} of {other}"
                )


def test_two_processes(tmp_path, capsys):
    """Losses, tokens and files equal those of one device; only the first process prints; each
    ends if the other is killed."""
    text, one, two = (tmp_path / name for name in ("text", "one", "two"))
    text.mkdir()
    for path in sorted((ROOT / "specjax" / "training").glob("c*.py")):
        shutil.copy(path, text)
    given = ["--data", str(text), "--target", str(one / "best")]
    pretrain.main(
        ["--data", str(text), *in_processes.LANGUAGE, "--out", str(one), "--stop-at", "4"]
    )
    distill.main([*given, *in_processes.DRAFT, "--out", str(tmp_path / "draft-one")])
    medusa.main([*given, *in_processes.HEADS, "--out", str(tmp_path / "heads-one")])
    drafter.main([*given, *in_processes.READER, "--out", str(tmp_path / "reader-one")])
    capsys.readouterr()
    medusa.main([*given, *in_processes.HEADS, "--out", str(tmp_path / "heads-one"), "--show-mask"])
    mask = capsys.readouterr().out
    model = specjax.load(one / "best")
    wanted = specjax.generate(model, in_processes.PROMPTS, **in_processes.DECODED)
    # The two processes go on from the second step of one device.
    shutil.copytree(one, two)
    shutil.rmtree(two / "state" / "4")

    address = f"localhost:{free_port()}"
    files = [tmp_path / f"{name}.{n}" for n in range(2) for name in ("stdout", "stderr")]
    both = []
    for n in range(2):
        with open(files[2 * n], "w") as told, open(files[2 * n + 1], "w") as complained:
            command = [
                sys.executable,
                "tests/in_processes.py",
                str(tmp_path),
                str(text),
                address,
                str(n),
            ]
            both.append(
                subprocess.Popen(
                    command, stdout=told, stderr=complained, cwd=ROOT, env=environment(2, 2)
                )
            )
    try:
        # Steps after the checkpoint of step 4 are not saved; only they are lost.
        _wait(lambda: _step(two) >= 5 or any(p.poll() is not None for p in both), 500)
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

    same(metrics(two), metrics(one))
    for job in ("draft", "heads", "reader"):
        same(metrics(tmp_path / f"{job}-two"), metrics(tmp_path / f"{job}-one"))
    told, silent = files[0].read_text(), files[2].read_text()
    assert silent == ""
    assert mask in told and f"resumed {two} at step 2 of" in told
    assert json.dumps(wanted.tokens) in told.splitlines()
    saved = specjax.load(tmp_path / "saved")
    np.testing.assert_array_equal(saved.params["embedding"], model.params["embedding"])
    assert (tmp_path / "heads-two" / "model" / "target" / "config.json").exists()

    # One process with one device, a mesh of its own, goes on from the last checkpoint.
    last = max(int(p.name) for p in (two / "state").iterdir() if p.name.isdecimal())
    common = ["--data", str(text), *in_processes.LANGUAGE, "--out", str(two), "--mesh", "data=1"]
    pretrain.main([*common, "--stop-at", str(last + 1)])
    assert f"resumed {two} at step {last} of" in capsys.readouterr().out
    assert _step(two) == last + 1


def _step(out: pathlib.Path) -> int:
    return max((line["step"] for line in metrics(out, 10**9)), default=0)


def _wait(ready, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < ends, "nothing happened"
        time.sleep(0.2)


@pytest.mark.parametrize("number", [0, 1])
def test_nobody_comes(number):
    """If the other process never comes, a clear error follows soon."""
    address = f"localhost:{free_port()}"
    code = f"from specjax.parallel.processes import join; join({address!r}, 2, {number}, timeout=3)"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment(1)
    )
    assert done.returncode == 2 and time.monotonic() - began < 60
    assert f"the 2 processes did not come together at {address} within 3 s" in done.stderr
    assert "Check failure stack trace" not in done.stderr


def test_no_cluster():
    """`auto` outside of a cluster says what to pass instead; in a process of its own, since it
    redirects stdout."""
    code = "from specjax.parallel.processes import join; join('auto', None, None)"
    inherited = environment(1).items()
    alone = {k: v for k, v in inherited if not k.startswith(("JAX_", "OMPI_", "SLURM_"))} | {
        "JAX_PLATFORMS": "cpu"
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=alone,
        timeout=60,
    )
    assert (
        done.returncode == 1 and "no cluster that JAX knows has started this process" in done.stderr
    )
    assert "pass HOST:PORT of process 0, --num-processes and --process-id" in done.stderr


_WAITING = """
import sys
from jax.experimental import multihost_utils
from specjax.parallel.processes import join

join(sys.argv[1], 2, int(sys.argv[2]))
print("joined", file=sys.stderr, flush=True)
if sys.argv[2] == "0":
    sys.stdin.read()
multihost_utils.sync_global_devices("for a process that never comes")
"""


def test_the_first_dies(tmp_path):
    """If the coordinator dies, a process waiting in a collective ends at once with a clear
    error."""
    address, files, both = f"localhost:{free_port()}", [tmp_path / "0", tmp_path / "1"], []
    for n, file in enumerate(files):
        with open(file, "w") as complained:
            command = [sys.executable, "-c", _WAITING, address, str(n)]
            both.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stderr=complained,
                    cwd=ROOT,
                    env=environment(1, 2),
                )
            )
    try:
        _wait(lambda: all("joined" in file.read_text() for file in files), 120)
        time.sleep(0.5)  # by now it waits
        both[0].kill()
        began = time.monotonic()
        assert both[1].wait(60) == 2, files[1].read_text()
        assert time.monotonic() - began < 30
    finally:
        for process in both:
            process.kill()
            process.communicate()
    message = files[1].read_text()
    assert "process 0 of 2 is gone" in message and "--num-processes 1" in message, message
    assert "Check failure stack trace" not in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--coordinator", "localhost"], "--coordinator localhost must look like HOST:PORT"),
        (
            ["--coordinator", "localhost:1", "--process-id", "0"],
            "--coordinator localhost:1 needs --num-processes",
        ),
        (
            ["--coordinator", "localhost:1", "--num-processes", "2", "--process-id", "2"],
            "--process-id 2 of",
        ),
        (["--num-processes", "2"], "add it"),
        (["--mesh", "rows=2"], "must look like data=2,model=4"),
        (
            ["--mesh", "data=2,fsdp=4"],
            "data=2 times fsdp=4 times model=1 is not the number of devices, 1",
        ),
    ],
)
def test_what_cannot_be(options, message, tmp_path, capsys, monkeypatch):
    """Wrong options are refused before anything is read."""
    for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises((SystemExit, ValueError)) as caught:
        pretrain.main(["--data", str(tmp_path), "--out", str(tmp_path), *options])
    assert message in str(caught.value) + capsys.readouterr().err
    with pytest.raises(ValueError, match="JAX_PROCESS_ID=two"):
        monkeypatch.setenv("JAX_PROCESS_ID", "two")
        processes.join("localhost:1", 2, None)


def test_a_batch_that_does_not_divide(monkeypatch):
    """The error says which batch sizes would divide."""
    monkeypatch.setattr("specjax.training.loop.row_parts", lambda mesh: 4)
    with pytest.raises(
        ValueError, match=r"3 sequences at a time, which 4 devices .* take a batch of 8, or"
    ):
        mesh_of_run(pretrain.PretrainOptions(data=(), batch_size=6, accumulate=2))


def test_a_stranger_holds_nobody_up():
    """A connection that says nothing, or something else, is given up soon; what a process sends
    after its number stays in the socket."""
    secret = "a" * 32
    strangers = (b"", b"GET / HTTP/1.1\r\n", b"x" * 500, f"{'b' * 32} 1\n".encode())
    for said, who in (*((said, None) for said in strangers), (f"{secret} 3\nmore".encode(), 3)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(said)
            began = time.monotonic()
            assert processes._introduced(ours, secret) == who
            assert time.monotonic() - began < 10
            if who is not None:
                assert ours.recv(4) == b"more"


def test_addresses_of_a_host_whose_name_is_a_loopback(monkeypatch):
    """Its own addresses come first, and a connection tries them one after the other."""
    name = (None, None, ["127.0.1.1", "10.1.2.3"])
    monkeypatch.setattr(socket, "gethostbyname_ex", lambda _: name)
    found = processes.own_addresses()
    assert found.index("10.1.2.3") < found.index("127.0.1.1") and not found[0].startswith("127.")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        port = server.getsockname()[1]
        with processes._reach(["127.0.0.2", "127.0.0.1"], port) as link:
            assert link.getpeername() == ("127.0.0.1", port)
        with pytest.raises(OSError):
            processes._reach(["127.0.0.2", "127.0.0.3"], port)
