"""`python -m bench.first_process`: CPU seconds of whole commands, with an empty cache and again.

Each round is a folder for compiled programs that is empty at first, and two processes: the first
one compiles, and the second one finds the programs.  Imports, weights and the tokenizer are counted
too.  Beside them are the imports alone, below which no command comes.
"""

from __future__ import annotations

import compileall
import dataclasses
import os
import pathlib
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

import specjax
from bench.command import run
from specjax.measure import describe
from specjax.options import fields
from specjax.options.command import parse

_COMMANDS = {
    "imports": "import specjax.cli.generate",
    "generate": ("generate", "import os", "--max-new-tokens", "32", "--no-compare"),
    "plain": ("generate", "import os", "--max-new-tokens", "32", "--proposer", "none"),
    "serve": ("serve", "--port"),
}


@dataclasses.dataclass(frozen=True)
class FirstProcessOptions(fields.Options):
    """The options of `python -m bench.first_process`."""

    commands: tuple[str, ...] = fields.option(
        ("imports", "generate", "serve"), "that are run", choices=tuple(_COMMANDS)
    )
    rounds: int = fields.option(3, "whose medians are printed")
    devices: int = fields.option(1, "that XLA makes of the CPU")
    options: tuple[str, ...] = fields.option((), "of serve: more of its own, as one text each")

    def __post_init__(self) -> None:
        super().__post_init__()
        fields.inside(self, "[1, inf)", "rounds", "devices")


def _ready(command: list[str], environ: dict[str, str]) -> None:
    """Starts a server, waits until it serves, and stops it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    at = command.index("--port") + 1
    process = subprocess.Popen([*command[:at], str(port), *command[at:]], env=environ)
    try:
        while process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.05)
        raise OSError(f"the server ended with status {process.returncode}")
    finally:
        process.terminate()
        process.wait()


def seconds(name: str, o: FirstProcessOptions, home: str) -> float:
    """Returns the CPU seconds, user and system, of one process and its children."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    environ["XDG_CACHE_HOME"] = home
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # then Python would compile specjax each time
    if o.devices > 1:
        environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={o.devices}"
    asked = _COMMANDS[name]
    command = [sys.executable, *(["-c", asked] if isinstance(asked, str) else ["-m", "specjax"])]
    if not isinstance(asked, str):
        command += asked
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    if name == "serve":
        _ready([*command, *(part for text in o.options for part in text.split())], environ)
    else:
        subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(argv: list[str] | None = None) -> None:
    o = parse(FirstProcessOptions, argv, __doc__, "python -m bench.first_process")
    # As pip does it when it installs a package.
    compileall.compile_dir(pathlib.Path(specjax.__file__).parent, quiet=2)
    head = describe()
    print(f"{head['cores']} cores, jax {head['jax']}, {o.devices} devices, median of {o.rounds}")
    print(
        "| command | first, s of CPU | least to greatest | second, s of CPU | least to greatest |"
    )
    print("|---" * 5 + "|")
    for name in o.commands:
        found: list[tuple[float, float]] = []
        for _ in range(o.rounds):
            with tempfile.TemporaryDirectory() as home:
                found.append((seconds(name, o, home), seconds(name, o, home)))
        both = zip(*found, strict=True)
        cells = (f"{statistics.median(x):.1f} | {min(x):.1f} to {max(x):.1f}" for x in both)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    run(main)
