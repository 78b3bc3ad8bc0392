"""Training runs that are killed at random moments, and resumed until they are done:

    python -m tests.kills --kills 100 --seed 1

The jobs are `pretrain`, `distill`, `medusa`, `drafter`, and a `pretrain` of two processes.  Each
is run once without a disturbance.  Then it is run again, and SIGKILL ends it at a random moment,
again and again.  The last call is left alone.  Then the models, the last checkpoint and the metrics
must have the bytes of the undisturbed run.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
import orbax.checkpoint as ocp

ROOT = pathlib.Path(__file__).parent.parent
SIZES = ("--hidden-size", "16", "--mlp-size", "32", "--num-layers", "1", "--num-heads", "2",
         "--num-kv-heads", "1")  # fmt: skip
LOOP = ("--steps", "12", "--save-every", "1", "--eval-every", "4", "--log-every", "2",
        "--warmup-steps", "2", "--sequence-length", "32", "--batch-size", "4",
        "--eval-batches", "1")  # fmt: skip
JOBS = {
    "pretrain": ("pretrain", *LOOP, *SIZES, "--vocab-size", "300"),
    "distill": ("distill", *LOOP, *SIZES, "--sampled-sequences", "16", "--sampled-batch", "4",
                "--sampled-prompt", "8"),
    "medusa": ("medusa", *LOOP, "--num-heads", "2", "--written-sequences", "4",
               "--written-prompt", "8"),
    "drafter": ("drafter", *LOOP, "--kind", "dspark", "--num-drafts", "3", "--num-layers", "1",
                "--mlp-size", "32", "--taps", "0", "1", "--markov-rank", "4"),
    "two processes": ("pretrain", *LOOP, *SIZES, "--vocab-size", "300", "--mesh", "data=2,fsdp=2"),
}  # fmt: skip
KILLS_PER_RUN = 4
PATIENCE = 600  # seconds that a call may take


def start(
    job: str, out: pathlib.Path, text: pathlib.Path, target: pathlib.Path, log: pathlib.Path
) -> list[subprocess.Popen]:
    """The processes of one call of a job."""
    module, *options = JOBS[job]
    more = [] if module == "pretrain" else ["--target", str(target)]
    command = [sys.executable, "-m", f"train.{module}", "--data", str(text), "--out", str(out)]
    count = 2 if job == "two processes" else 1
    flags = "--xla_backend_optimization_level=0"
    if count > 1:
        flags += " --xla_force_host_platform_device_count=2"
        with socket.socket() as bound:
            bound.bind(("", 0))
            address = f"localhost:{bound.getsockname()[1]}"
        more += ["--coordinator", address, "--num-processes", str(count), "--process-id"]
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags
    }  # fmt: skip
    started = []
    for number in range(count):
        own = [*more, str(number)] if count > 1 else more
        with open(log, "a") as file:
            started.append(
                subprocess.Popen(
                    [*command, *options, *own], cwd=ROOT, env=environment, stdout=file, stderr=file
                )
            )
    return started


def call(started: list[subprocess.Popen], after: float | None, drawn: np.random.Generator) -> int:
    """Wait for the processes of a call, or kill one of them after some seconds.

    Returns:
      The number of processes that were killed: 0 if the call was done before.

    Raises:
      RuntimeError: the call failed, and no process of it was killed.
      TimeoutError: it takes too long.
    """
    ends, killed = time.monotonic() + (PATIENCE if after is None else after), 0
    while any(process.poll() is None for process in started):
        if time.monotonic() > ends:
            if after is None:
                for process in started:
                    process.kill()
                raise TimeoutError(f"a call took longer than {PATIENCE} s")
            victim = started[drawn.integers(len(started))]
            killed = int(victim.poll() is None)
            victim.send_signal(signal.SIGKILL)
            break
        time.sleep(0.01)
    for process in started:  # the others end by themselves when one of them is gone
        process.wait(PATIENCE)
    if not killed and any(process.returncode for process in started):
        raise RuntimeError(f"a call ended with {[process.returncode for process in started]}")
    return killed


def files(out: pathlib.Path) -> dict[str, bytes]:
    """What a finished run leaves: models, metrics without times, the hashes of the checkpoint."""
    found = {
        f"{name}/{path.relative_to(out / name)}": path.read_bytes()
        for name in ("model", "best")
        for path in sorted((out / name).rglob("*"))
        if path.is_file()
    }
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("tokens_per_second", None)
    return {**found, "metrics.jsonl": json.dumps(lines).encode(), **arrays(out)}


def arrays(out: pathlib.Path) -> dict[str, bytes]:
    """The arrays of the last checkpoint."""
    folder = out / "state"
    step = max(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    reader, path = ocp.PyTreeCheckpointer(), folder / str(step) / "default"
    metadata = reader.metadata(path)
    metadata = getattr(metadata, "item_metadata", metadata)  # it depends on Orbax's version
    # As NumPy arrays, since this process has not the devices of the run.
    plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata.tree)
    restored = reader.restore(path, restore_args=plain)
    leaves: dict[str, bytes] = {"step": str(step).encode()}

    def add(name: str, value: object) -> None:
        if isinstance(value, dict):
            for key, branch in value.items():
                add(f"{name}/{key}", branch)
        elif isinstance(value, list | tuple):
            for key, branch in enumerate(value):
                add(f"{name}/{key}", branch)
        elif value is not None:
            leaves[name] = np.asarray(value).tobytes()

    add("state", restored)
    return leaves


def differences(one: dict[str, bytes], two: dict[str, bytes]) -> list[str]:
    """The names of what differs between two finished runs."""
    return sorted(name for name in {*one, *two} if one.get(name) != two.get(name))


def same(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Are the folders of two finished runs equal, bit for bit?  Raises AssertionError if not."""
    found, wanted = files(one), files(other)
    kinds = {name.partition("/")[0] for name in wanted}
    assert kinds == {"model", "best", "metrics.jsonl", "step", "state"}, kinds
    assert not differences(found, wanted), f"{one}, {other}: {differences(found, wanted)} differ"
    return True


def main(argv: list[str] | None = None) -> None:
    with tempfile.TemporaryDirectory(prefix="specjax-kills-") as name:
        try:
            kill(pathlib.Path(name), argv)
        except (RuntimeError, TimeoutError) as error:
            log = (pathlib.Path(name) / "log").read_text()
            sys.exit(f"{log[-4000:]}\n{error}")


def kill(root: pathlib.Path, argv: list[str] | None) -> None:
    """Kill and resume in the folder `root`, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    asked = parser.parse_args(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"
    drawn = np.random.default_rng(asked.seed)
    text, log, plain = root / "text", root / "log", root / "plain"
    text.mkdir()
    for path in sorted((ROOT / "specjax" / "training").glob("[c-m]*.py")):
        shutil.copy(path, text)
    wanted, seconds = {}, {}
    target = plain / "pretrain" / "model"
    for job in dict.fromkeys(["pretrain", *asked.jobs]):
        began = time.monotonic()
        call(start(job, plain / job, text, target, log), None, drawn)
        seconds[job] = time.monotonic() - began
        wanted[job] = files(plain / job)
    kills: collections.Counter[str] = collections.Counter()
    runs: collections.Counter[str] = collections.Counter()
    resumed: collections.Counter[str] = collections.Counter()
    failed = []
    while kills.total() < asked.kills:
        job = asked.jobs[runs.total() % len(asked.jobs)]
        out = root / f"{job} {runs[job]}"
        log.write_text("")
        left = min(KILLS_PER_RUN, asked.kills - kills.total())
        while left:
            after = float(drawn.uniform(0.1, seconds[job]))
            killed = call(start(job, out, text, target, log), after, drawn)
            if not killed:
                break
            kills[job] += 1
            left -= 1
        call(start(job, out, text, target, log), None, drawn)
        runs[job] += 1
        said = log.read_text()
        resumed[job] += said.count("resumed ")
        if other := differences(files(out), wanted[job]):
            failed.append(f"{job}: {', '.join(other)} differ (--seed {asked.seed})")
        shutil.rmtree(out)
        print(f"{kills.total()} kills, {job}: {failed or 'equal'}", file=sys.stderr, flush=True)
    print("| job | runs | kills | calls that resumed a checkpoint | equal to the undisturbed run |")
    print("|---|---|---|---|---|")
    for job in asked.jobs:
        equal = runs[job] - sum(line.startswith(f"{job}:") for line in failed)
        print(f"| {job} | {runs[job]} | {kills[job]} | {resumed[job]} | {equal} |")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
