"""Prints how many lines of the decoding rooms core runs.

    python -m tests.covered            # runs core, prints a line for each room, and writes the map
    python -m tests.covered --missed   # also the lines that no test ran

The map says for each line which tests ran it, and `python -m tests.mutants` starts with these.  It
stands in `.coverage`, which is not committed.  JAX traces a function once and keeps what it traced,
so of several tests that share a program only the first runs its lines.  A map that is older than a
file of the library or of core names wrong lines and tests, and is not used.  The exit status is 1
if the rooms together are below 95 %.
"""

from __future__ import annotations

import argparse
import ast
import collections
import functools
import pathlib
import sys
from collections.abc import Iterator

import coverage

ROOT = pathlib.Path(__file__).parents[1]
DATA = ROOT / ".coverage"
ROOMS = (
    "decoding", "rules", "caches", "proposers", "methods", "sampling", "tree", "processors",
    "constraints",
)  # fmt: skip
"""Files and folders of specjax/."""

SOURCES = {
    "early_exit.py", "lookup.py", "proposer.py", "several.py", "source.py", "translated.py",
}  # fmt: skip
"""The files of a method that run in a step; readers and learners are not among the rooms."""

LEAST = 0.95


def files() -> Iterator[tuple[str, pathlib.Path]]:
    """Each room with its files."""
    for room in ROOMS:
        path = ROOT / "specjax" / room
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]:
            if room != "methods" or file.name in SOURCES:
                yield room, file


@functools.cache
def fresh() -> bool:
    """Returns whether there is a map that is newer than the library and the tests of core."""
    if not DATA.exists():
        return False
    sources = [*(ROOT / "specjax").rglob("*.py"), *(ROOT / "tests" / "core").glob("*.py")]
    return DATA.stat().st_mtime > max(path.stat().st_mtime for path in sources)


@functools.cache
def starts(file: pathlib.Path) -> dict[int, int]:
    """The first line of the innermost statement that each line of a file belongs to."""
    first: dict[int, int] = {}
    for node in ast.walk(ast.parse(file.read_text())):  # outer statements before inner ones
        if isinstance(node, ast.stmt):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                first[line] = node.lineno
    return first


@functools.cache
def _contexts(file: pathlib.Path) -> dict[int, list[str]]:
    data = coverage.CoverageData(basename=str(DATA))
    data.read()
    return data.contexts_by_lineno(str(file))


def tests_of(file: pathlib.Path, line: int) -> list[str]:
    """The tests that ran the statement of a line, as node ids; none without a fresh map."""
    if not fresh():
        return []
    found = _contexts(file).get(starts(file).get(line, line), [])
    return sorted({context.rpartition("|")[0] for context in found if context})


@functools.cache
def measured() -> frozenset[str]:
    """The files of tests that a fresh map knows."""
    if not fresh():
        return frozenset()
    data = coverage.CoverageData(basename=str(DATA))
    data.read()
    return frozenset(context.partition("::")[0] for context in data.measured_contexts())


@functools.cache
def sizes() -> collections.Counter[str]:
    """How many tests of each file a fresh map knows, by the file's name."""
    if not fresh():
        return collections.Counter()
    data = coverage.CoverageData(basename=str(DATA))
    data.read()
    tests = {context.rpartition("|")[0] for context in data.measured_contexts() if context}
    return collections.Counter(pathlib.Path(test.partition("::")[0]).name for test in tests)


def report(missed: bool) -> int:
    """Prints the share of lines that core ran, a room a line; returns the exit status."""
    measured = coverage.Coverage(data_file=str(DATA), config_file=False)
    measured.load()
    lines, unseen = collections.Counter[str](), collections.Counter[str]()
    for room, file in files():
        _, all_lines, _, never, where = measured.analysis2(str(file))
        lines[room] += len(all_lines)
        unseen[room] += len(never)
        if missed and never:
            print(f"  {file.relative_to(ROOT)}: {where}")
    for room in ROOMS:
        print(f"{room:14} {1 - unseen[room] / lines[room]:6.1%} of {lines[room]} lines")
    share = 1 - sum(unseen.values()) / sum(lines.values())
    print(f"{'together':14} {share:6.1%} of {sum(lines.values())} lines")
    return int(share < LEAST)


def main() -> int:
    import pytest

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--missed", action="store_true", help="print the lines that no test ran")
    parser.add_argument("--report", action="store_true", help="of the map as it is; run nothing")
    parser.add_argument("--workers", default="auto", help="processes that run tests; 0: this one")
    parser.add_argument("files", nargs="*", help="files of tests instead of all of core")
    chosen = parser.parse_args()
    if not chosen.report:
        options = ["--cov=specjax", "--cov-context=test", "--cov-report=", "-n", chosen.workers]
        if chosen.workers == "0":  # or pytest-cov waits for workers, and notes no names of tests
            options.append("--dist=no")
        status = pytest.main([*options, *chosen.files])
        if status:
            return status
    return report(chosen.missed)


if __name__ == "__main__":
    sys.exit(main())
