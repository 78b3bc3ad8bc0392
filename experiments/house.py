"""Counts how easy the library is to read, for the table in CONTRIBUTING.md.

    python -m experiments.house

The call that is followed is `generate(target, prompt, draft=draft)` with the shipped models, from
the public function to the tokens: the files of specjax/ in which Python runs, and the calls that
climb.  A call climbs if it leads to a floor above its caller's, by the floors of
tests/core/test_floors.py.  Two kinds do not count: calls from the lowest floor, which calls what it
was given, such as a function to compile, and calls of a method that the contract declares, by which
a shape asks its source and the decoder its proposer.
"""

from __future__ import annotations

import argparse
import ast
import collections
import inspect
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
LIBRARY = ROOT / "specjax"
COMPLEX = 15
"""A function with more branches and loops than this is complex (McCabe 1976, as ruff counts)."""

APART = ("training", "options", "cli")
"""Rooms of the trainer, of options, and of the commands that have them."""


def sources(*without: str) -> list[pathlib.Path]:
    """The files of the library, but those of some rooms."""
    return [
        path
        for path in sorted(LIBRARY.rglob("*.py"))
        if path.relative_to(LIBRARY).parts[0] not in without
    ]


def lines(files: list[pathlib.Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in files)


def count(files: list[pathlib.Path], *kinds: type[ast.AST]) -> int:
    """The nodes of these kinds in the syntax trees of the files."""
    return sum(
        isinstance(node, kinds) for path in files for node in ast.walk(ast.parse(path.read_text()))
    )


def anys(files: list[pathlib.Path]) -> int:
    """How often `Any`, or `Arrays`, which is an alias of it, stands in an annotation."""
    return sum(
        isinstance(node, ast.Name) and node.id in ("Any", "Arrays")
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
    )


def complex_functions() -> int:
    """Functions with more than `COMPLEX` branches, by ruff."""
    rule = f"lint.mccabe.max-complexity={COMPLEX}"
    command = ["ruff", "check", "--select", "C901", "--config", rule, "--output-format", "concise"]
    ruff = [sys.executable, "-m", *command, str(LIBRARY)]
    made = subprocess.run(ruff, capture_output=True, text=True, check=False, cwd=ROOT)
    return made.stdout.count(": C901 ")


def floors() -> dict[str, int]:
    """The floor of each room, from the test that holds them."""
    tree = ast.parse((ROOT / "tests" / "core" / "test_floors.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS":
            found: dict[str, list[str]] = ast.literal_eval(node.value)
            return {room: n for n, rooms in enumerate(found.values()) for room in rooms}
    raise ValueError("tests/core/test_floors.py has no FLOORS")


def declared() -> set[str]:
    """Returns the names of the methods that the classes of the contract declare."""
    return {
        method.name
        for path in (LIBRARY / "contract").glob("*.py")
        for owner in ast.walk(ast.parse(path.read_text()))
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, ast.FunctionDef)
    }


def room_of(path: pathlib.Path) -> str:
    return ".".join(("specjax", *path.relative_to(LIBRARY).with_suffix("").parts[:1]))


def follow(what: Any) -> tuple[list[pathlib.Path], collections.Counter[tuple[str, str]]]:
    """Call a function.

    Returns:
      The files of specjax/ in which it ran, in the order in which they were entered, and the calls
      that climbed, by the files of caller and callee.
    """
    floor, methods = floors(), declared()
    entered: dict[pathlib.Path, None] = {}
    climbs = collections.Counter[tuple[str, str]]()

    def here(frame: FrameType | None) -> pathlib.Path | None:
        path = None if frame is None else pathlib.Path(frame.f_code.co_filename)
        return path if path is not None and path.is_relative_to(LIBRARY) else None

    def watch(frame: FrameType, event: str, _: Any) -> None:
        imported = not frame.f_code.co_flags & inspect.CO_OPTIMIZED  # the body of a module or class
        if event != "call" or imported or (path := here(frame)) is None:
            return
        entered.setdefault(path)
        contract = "." in frame.f_code.co_qualname and frame.f_code.co_name in methods
        if not contract and (above := here(frame.f_back)) is not None:
            rooms = room_of(above), room_of(path)
            if 0 < floor[rooms[0]] < floor[rooms[1]]:
                names = (str(each.relative_to(LIBRARY)) for each in (above, path))
                climbs[tuple(names)] += 1  # type: ignore[index]

    sys.setprofile(watch)
    try:
        what()
    finally:
        sys.setprofile(None)
    return list(entered), climbs


def figures() -> Iterator[tuple[str, float]]:
    """Each figure with its name."""
    every, plain = sources(), sources(*APART)
    per = lines(every) / 1000
    yield "files", len(every)
    yield "lines", lines(every)
    yield "lines without training, options and cli", lines(plain)
    yield "modules beside the folders", len(list(LIBRARY.glob("[!_]*.py")))
    yield (
        "files of EAGLE-3 outside of its folder",
        len([p for p in every if "eagle3" in p.stem and p.parent.name != "eagle3"]),
    )
    yield "complex functions of 1000", 1000 * complex_functions() / count(every, ast.FunctionDef)
    yield "raises per 1000 lines", count(every, ast.Raise) / per
    yield "Any per 1000 lines", anys(every) / per


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.house", description=__doc__)
    parser.add_argument(
        "--calls", action="store_true", help="list the files and the climbing calls"
    )
    asked = parser.parse_args(arguments)
    for name, value in figures():
        print(f"{name:42} {value:8.1f}" if value % 1 else f"{name:42} {value:8.0f}")

    import specjax

    target = specjax.load(specjax.shipped("pycode/target"))
    draft = specjax.load(specjax.shipped("pycode/draft"))
    entered, climbs = follow(
        lambda: specjax.generate(target, "def main(", draft=draft, max_new_tokens=8)
    )
    print(f"{'files that a call of generate runs through':42} {len(entered):8}")
    print(f"{'calls that climb, by caller and callee':42} {len(climbs):8}")
    if asked.calls:
        print("\n".join(f"  {path.relative_to(ROOT)}" for path in entered))
        print("\n".join(f"  {above} -> {path}: {n}" for (above, path), n in climbs.items()))


if __name__ == "__main__":
    main()
