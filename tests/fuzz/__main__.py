"""Runs cases in child processes, survives what they do, and counts outcomes.

    python -m tests.fuzz --seconds 600 [--cases N] [--seed N] [--only KIND ...]
    python -m tests.fuzz --case KIND:SEED

A child runs cases of one kind, seed after seed.  If it dies or takes too long over one, the case is
counted and the next child goes on behind it.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time

from tests.fuzz import law

KINDS = (
    "configurations", "headers", "indices", "packed", "tokenizers", "templates", "drafters",
    "arguments", "requests",
)  # fmt: skip
_START = 180.0  # seconds until a child is ready
_SHOWN = 40  # failing cases that are listed


class Child:
    """A process that runs cases of one kind from a seed on."""

    def __init__(self, kind: str, first: int, folder: str) -> None:
        self.command = [sys.executable, "-m", "tests.fuzz.child", kind, str(first), folder]
        self.errors = open(pathlib.Path(folder) / "stderr", "wb")
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "RUST_BACKTRACE": "0",
            "HF_HUB_OFFLINE": "1",
        }
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=self.errors, env=environment
        )
        self._held = b""

    def line(self, seconds: float) -> str | None:
        """The next line; "" if it ended; None if nothing came in so many seconds."""
        assert self.process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._held:
            ready, _, _ = select.select(
                [self.process.stdout], [], [], max(0, end - time.monotonic())
            )
            if not ready:
                return None
            got = os.read(self.process.stdout.fileno(), 2**16)
            if not got:
                return ""
            self._held += got
        line, self._held = self._held.split(b"\n", 1)
        return line.decode()

    def end(self) -> int:
        self.process.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.errors.close()
        return self.process.wait()


class Campaign:
    """The counts of all kinds, and the cases that broke the law."""

    def __init__(self) -> None:
        self.counts = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
        self.failures: list[tuple[str, int, str]] = []

    def run(self, kind: str, first: int, seconds: float, most: int | None = None) -> None:
        """Run cases of one kind for so many seconds after the first child is ready."""
        end, seed, last = None, first, first + most if most else None
        while (end is None or time.monotonic() < end) and (last is None or seed < last):
            with tempfile.TemporaryDirectory(prefix="specjax-fuzz-") as folder:
                child = Child(kind, seed, folder)
                if child.line(_START) != "ready":
                    status, text = child.end(), (pathlib.Path(folder) / "stderr").read_text()
                    raise SystemExit(f"{kind}: the child did not start (exit {status})\n{text}")
                end = time.monotonic() + seconds if end is None else end
                while time.monotonic() < end and (last is None or seed < last):
                    line = child.line(law.SECONDS)
                    if line:
                        self.count(kind, seed, line.split(" ", 1)[1])
                        seed += 1
                        continue
                    status = child.end()
                    words = (
                        (pathlib.Path(folder) / "stderr").read_text(errors="replace").split("\n")
                    )
                    ended = f"ends its process ({status}) {words[-2:-1]}"
                    self.count(kind, seed, "hangs" if line is None else ended)
                    seed += 1
                    break
                child.end()

    def count(self, kind: str, seed: int, outcome: str) -> None:
        if outcome in law.OBEYED:
            self.counts[kind][outcome] += 1
            return
        self.counts[kind]["breaks the law"] += 1
        self.failures.append((kind, seed, outcome))

    def table(self) -> str:
        """Markdown, a row for each kind."""
        rows = ["| kind | cases | refused | works | breaks the law |", "|---|---|---|---|---|"]
        total = collections.Counter[str]()
        for kind, counts in self.counts.items():
            if counts:
                rows.append(_row(kind, counts))
                total += counts
        return "\n".join([*rows, _row("all", total)])


def _row(name: str, counts: collections.Counter[str]) -> str:
    numbers = [sum(counts.values()), *(counts[key] for key in (*law.OBEYED, "breaks the law"))]
    return f"| {name} | " + " | ".join(map(str, numbers)) + " |"


def _one(kind: str, seed: int) -> str:
    """Run one case here, so that a debugger sees it."""
    from tests.fuzz.kinds import KINDS as made

    with tempfile.TemporaryDirectory(prefix="specjax-fuzz-") as folder:
        place = pathlib.Path(folder)
        case = made[kind](place).case(law.rng_of(kind, seed))
        try:
            print(f"returns {str(case.act())[:500]}")
        except Exception as error:
            import traceback

            traceback.print_exception(error, limit=-6)
        return law.Watch(place).judge(case)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all kinds together")
    parser.add_argument(
        "--cases", type=int, help="at most so many of each kind, which any machine runs alike"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first case of each kind")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="these kinds")
    parser.add_argument("--case", help="KIND:SEED; run this case alone")
    options = parser.parse_args(arguments)
    if options.cases is not None and options.cases < 1:
        parser.error(f"--cases {options.cases}: pass at least 1")
    if options.case:
        kind, _, seed = options.case.partition(":")
        if kind not in KINDS or not seed.isdigit():
            parser.error(f"--case {options.case}: pass KIND:SEED, such as templates:7")
        outcome = _one(kind, int(seed))
        print(outcome)
        return outcome not in law.OBEYED
    campaign, started = Campaign(), time.monotonic()
    for kind in options.only:
        share = options.seconds / len(options.only)
        campaign.run(kind, options.seed * 10**9, share, options.cases)
    print(campaign.table())
    print(f"{time.monotonic() - started:.0f} s, seed {options.seed}")
    alike = collections.defaultdict(list)
    for kind, seed, outcome in campaign.failures:
        alike[kind, *outcome.split()[:5]].append(f"{kind}:{seed} {outcome}")
    for cases in sorted(alike.values(), key=len, reverse=True)[:_SHOWN]:
        print(f"{len(cases)} x {cases[0]}")
    return bool(campaign.failures)


if __name__ == "__main__":
    sys.exit(main())
