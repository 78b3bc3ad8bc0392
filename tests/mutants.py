"""Plants small faults one after the other, and prints which test of core finds each.

    python -m tests.mutants --count 300 --seed 1
    python -m tests.mutants --only specjax/rules/match.py:35
    python -m tests.mutants --resume build/judged.jsonl   # an interrupted run goes on from here

A mutant is a change of one place in one file: a comparison, an operator, a number, a sign, a
condition, or a line that is left out.  Each mutant has a process of its own, which runs tests until
one fails.  All mutants first meet some tests that ran their line, if `python -m tests.covered` has
written which these are.  Those that are left meet the files that `TESTS` names for their
room, but those that never run their line.  In the end the tests that found mutants run once more
without any, and a test that fails then has found nothing.

The output is a line for each mutant with the test that found it.  `tests/equivalent.json` says of
some mutants, by their line and their change, why no test can find them: the program computes the
same.  The exit status is 1 if more than 5 % of the others survive.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import pathlib
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator

from tests import covered

ROOT = pathlib.Path(__file__).parents[1]
EQUIVALENT = ROOT / "tests" / "equivalent.json"
COSTS = ROOT / "tests" / "costs.json"
SECONDS = 120
"""Of CPU, after which a mutant counts as found: its loop does not end."""

NEAREST = 6.0
"""Seconds of tests that ran the line of a mutant, which are run before whole files are."""

TESTS: dict[str, str] = {
    "decoding/decoder": "decoder laws_chains:table&chain-match laws_chains:static&rejection "
    "contract",
    "decoding/commit": "decoder laws_chains:table&chain-match laws_chains:typical",
    "decoding/inputs": "decoder prefill",
    "decoding/prefill": "decoder prefill taps memory laws_chains:table&chain-match",
    "decoding/host_grammar": "guided",
    "rules/": "walks inexact_rules variants rules laws_chains:typical laws_chains:chain-block",
    "caches/choosing": "choosing_caches cache",
    "caches/hybrid": "hybrid hybrid_decoding outer_products cache",
    "caches/layer_state": "hybrid outer_products hybrid_decoding recurrent_mixers",
    "caches/recurrent": "properties_caches hybrid cache proposers",
    "caches/rounded": "rounded_cache cache",
    "caches/": "cache draft_windows properties_caches prefill ring laws_chains:static&rejection",
    "proposers/adaptive/": "proposers_refused choosing choosing_batch "
    "laws_others:adaptive-match adaptive",
    "proposers/adaptive/choosing": "choosing choosing_batch adaptive",
    "proposers/adaptive/rest": "rest adaptive",
    "proposers/adaptive/settling": "settling adaptive",
    "proposers/adaptive/tree_gains": "tree_gains adaptive_generate",
    "proposers/adaptive/trials": "choosing choosing_batch adaptive",
    "proposers/adaptive/rates": "choosing choosing_batch adaptive",
    "proposers/shapes/best_first": "best_first proposers laws_trees:first-rejection",
    "proposers/shapes/choice": "choices best_first proposers laws_trees:choices-match",
    "proposers/aligned": "aligned proposers_refused",
    "proposers/combine/calibrated": "calibrated tree_gains laws_others:calibrated",
    "proposers/combine/cost_aware": "cost_aware best_first",
    "proposers/combine/first_of": "proposers_refused proposers laws_others:of-rejection",
    "methods/block/source": "sources_of_features proposers",
    "methods/datastore/lookup": "suffix_tree datastore sources documents",
    "methods/datastore/proposer": "suffix_tree datastore sources",
    "methods/datastore/source": "suffix_tree datastore sources",
    "methods/draft_model/source": "proposers draft_laws sources laws_drafts:draft&3",
    "methods/draft_model/translated": "universal sources laws_drafts:universal",
    "methods/eagle3/source": "eagle3 laws_heads:eagle3-match sources_of_features",
    "methods/early_exit": "early_exit sources proposers",
    "methods/medusa/source": "medusa sources laws_heads:medusa",
    "methods/mtp/several": "sources_of_features",
    "methods/mtp/source": "sources_of_features laws_heads:mtp",
    "methods/gemma_assistant/source": "sources_of_features",
    "methods/peagle/source": "eagle3 sources_of_features proposers",
    "proposers/waiting": "waiting",
    "proposers/": "proposers proposers_refused chain_depth laws_trees:dynamic&match",
    "sampling.py": "properties_sampling sampling decoder rules laws_chains:table&chain-match",
    "tree.py": "tree properties_trees walks proposers",
    "processors.py": "processors properties_sampling processor_laws",
    "constraints/automaton": "grammar constraint guided constraint_laws",
    "constraints/": "schemas grammar constraint guided",
}
"""The files of tests that know a room, the cheapest first; the longest prefix counts.  After a
colon stand the words of the names of its tests, for `-k`: a pair of the laws, for example."""

SWAPPED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-",
    ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "+", ast.BitAnd: "|",
    ast.BitOr: "&", ast.And: "or", ast.Or: "and",
}  # fmt: skip
NAMES = {
    "minimum": "maximum", "maximum": "minimum", "argmax": "argmin", "argmin": "argmax",
    "any": "all", "all": "any", "min": "max", "max": "min", "cumsum": "cumprod",
    "zeros": "ones", "ones": "zeros", "zeros_like": "ones_like", "ones_like": "zeros_like",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, order=True)
class Mutant:
    """A file of which a span is written differently."""

    file: str  # below the root
    line: int
    start: int  # in bytes
    end: int
    old: str
    new: str

    @property
    def name(self) -> str:
        """Place and change, which do not depend on the lines before it."""
        return f"{self.file}:{self.line}: {self.old} -> {self.new or '(left out)'}"

    def key(self, source: str) -> str:
        """As in `EQUIVALENT`: the line with the change, wherever the line stands."""
        text = source.encode()
        begin, end = text.rfind(b"\n", 0, self.start) + 1, text.find(b"\n", self.end)
        before, after = text[begin : self.start].decode(), text[self.end : end].decode()
        return f"{self.file}: {before.lstrip()}[{self.old} -> {self.new}]{after.rstrip()}"

    def source(self) -> bytes:
        text = (ROOT / self.file).read_bytes()
        return text[: self.start] + self.new.encode() + text[self.end :]


class _Places(ast.NodeVisitor):
    """The mutants of a file.  Annotations, docstrings, messages and decorators are left as they
    are."""

    def __init__(self, file: str):
        self.file, self.text = file, (ROOT / file).read_bytes()
        lines = self.text.split(b"\n")
        self.starts = [0]
        for line in lines:
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.found: list[Mutant] = []
        self.depth = 0

    def at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def add(self, line: int, start: int, end: int, new: str) -> None:
        if self.depth:
            old = " ".join(self.text[start:end].decode().split())
            self.found.append(Mutant(self.file, line, start, end, old, new))

    def between(self, left: ast.expr, right: ast.expr, operator: ast.AST) -> None:
        """Swap an operator between two operands."""
        new = SWAPPED.get(type(operator))
        if new is None:
            return
        start = self.at(left.end_lineno or 0, left.end_col_offset or 0)
        end = self.at(right.lineno, right.col_offset)
        gap = self.text[start:end]
        old = gap.strip(b" ()\n").split(b"#")[0].strip()
        if old and gap.count(old) == 1:
            at = start + gap.index(old)
            self.add(left.end_lineno or 0, at, at + len(old), new)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right, operator in zip(
            [node.left, *node.comparators], node.comparators, node.ops, strict=False
        ):
            self.between(left, right, operator)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.between(node.left, node.right, node.op)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between(left, right, node.op)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        start = self.at(node.lineno, node.col_offset)
        self.add(node.lineno, start, self.at(node.operand.lineno, node.operand.col_offset), "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            new = str(not value)
        elif isinstance(value, int):
            new = str(value + 1)
        elif isinstance(value, float):
            new = repr(value * 2 + 1)
        else:
            return
        start, end = self.at(node.lineno, node.col_offset), node.end_col_offset or 0
        self.add(node.lineno, start, self.at(node.end_lineno or 0, end), new)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in NAMES:
            end = self.at(node.end_lineno or 0, node.end_col_offset or 0)
            self.add(node.end_lineno or 0, end - len(node.attr), end, NAMES[node.attr])
        self.generic_visit(node)

    def leave_out(self, node: ast.stmt) -> None:
        start = self.at(node.lineno, node.col_offset)
        end = self.at(node.end_lineno or 0, node.end_col_offset or 0)
        self.add(node.lineno, start, end, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):  # a docstring
            return
        self.leave_out(node)
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.leave_out(node)  # and its message stays

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.leave_out(node)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """An assignment is left out where the name has a value before."""
        names = {name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)}
        read = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
        if names and names <= read:
            self.leave_out(node)
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.depth += 1
        for statement in node.body:
            self.visit(statement)
        self.depth -= 1
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)

    def visit_Assert(self, node: ast.Assert) -> None:
        """An assertion is for readers and type checkers."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A message."""


def room(file: str) -> str | None:
    """The longest prefix in `TESTS` of a file below `specjax/`."""
    below = file.removeprefix("specjax/")
    found = [prefix for prefix in TESTS if below.startswith(prefix)]
    return max(found, key=len, default=None)


def places() -> Iterator[Mutant]:
    """All mutants of the rooms."""
    for path in sorted((ROOT / "specjax").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if path.name != "__init__.py" and room(file):
            visitor = _Places(file)
            visitor.visit(ast.parse(visitor.text))
            yield from visitor.found


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from the source of a mutant."""

    def __init__(self, name: str, path: str, mutant: Mutant):
        super().__init__(name, path)
        self.mutant = mutant

    def get_code(self, fullname: str):
        return compile(self.mutant.source(), self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant):
        self.name = mutant.file.removesuffix(".py").replace("/", ".")
        self.mutant = mutant

    def find_spec(self, fullname, path, target=None):
        if fullname != self.name:
            return None
        file = str(ROOT / self.mutant.file)
        loader = _Loader(fullname, file, self.mutant)
        return importlib.util.spec_from_file_location(fullname, file, loader=loader)


def nearest(mutant: Mutant) -> list[str]:
    """Tests that ran a mutant's line: of the files of its room, then of the cheapest others."""
    costs, sizes = json.loads(COSTS.read_text()), covered.sizes()
    by_file = collections.defaultdict(list)
    for test in covered.tests_of(ROOT / mutant.file, mutant.line):
        by_file[pathlib.Path(test.partition("::")[0]).name].append(test)
    found = room(mutant.file)
    assert found is not None
    own = [f"test_{entry.partition(':')[0]}.py" for entry in TESTS[found].split()]
    own = [f for f in dict.fromkeys(own) if f in by_file and not f.startswith("test_laws_")]
    others = sorted(by_file.keys() - set(own), key=lambda file: (costs.get(file, 99), file))
    chosen: list[str] = []
    left = NEAREST
    for file in (*own, *others):
        each = costs.get(file, 9) / sizes[file]  # seconds of a test
        most = max(1, int(min(left, NEAREST / 2) / each)) if file in own else 1
        some = by_file[file][:most]
        if left > 0:
            chosen += some
            left -= each * len(some)
    return chosen


def near(mutant: Mutant) -> list[list[str]]:
    """The arguments of the first run of pytest."""
    tests = nearest(mutant)
    return [tests] if tests else []


def whole(mutant: Mutant) -> list[list[str]]:
    """The arguments of the later runs of pytest, one for each entry of `TESTS`, in their order."""
    found = room(mutant.file)
    assert found is not None
    ran = {test.partition("::")[0] for test in covered.tests_of(ROOT / mutant.file, mutant.line)}
    runs = []
    for entry in TESTS[found].split():
        name, _, words = entry.partition(":")
        (path,) = (ROOT / "tests").glob(f"*/test_{name}.py")
        file = str(path.relative_to(ROOT))
        if file in covered.measured() and file not in ran:
            continue
        chosen = ["-k", words.replace("&", " and ")] if words else []
        runs.append([*chosen, str(path)])
    return runs


def _run(runs: list[list[str]], first: bool) -> list[str]:
    """Runs pytest until a run fails, up to its `first` failure; returns which tests failed."""
    import pytest

    failed: list[str] = []

    class Failures:
        def pytest_runtest_logreport(self, report):
            if report.failed:
                failed.append(report.nodeid)

        def pytest_collectreport(self, report):
            if report.failed:
                failed.append(f"{report.nodeid} (import)")

    sys.stdout = sys.stderr = printed = io.StringIO()
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", *(["-x"] if first else [])]
    for run in runs:
        status = pytest.main([*options, *run], [Failures()])
        if failed or status not in (0, 4, 5):  # 4, 5: no test has this name, or these words
            return failed or [f"status {status}"]
        if "while loading conftest" in printed.getvalue():  # whose status is 4, too
            return ["conftest.py (import)"]
    return []


def _forked(work: Callable[[], list[str]], out: pathlib.Path) -> int:
    """Starts a process that writes what `work` returns; returns its id."""
    pid = os.fork()
    if pid == 0:
        try:
            out.write_text(json.dumps(work()))
        finally:
            os._exit(0)
    return pid


def judge(
    mutants: list[Mutant],
    runs: Callable[[Mutant], list[list[str]]],
    workers: int,
    scratch: pathlib.Path,
) -> Iterator[tuple[Mutant, str | None]]:
    """Each mutant with the test that found it, or None, as they end."""

    def work(mutant: Mutant) -> list[str]:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 10))
        sys.meta_path.insert(0, _Finder(mutant))
        return _run(runs(mutant), first=True)

    running: dict[int, tuple[Mutant, pathlib.Path]] = {}
    waiting = collections.deque(enumerate(mutants))
    while waiting or running:
        while waiting and len(running) < workers:
            number, mutant = waiting.popleft()
            out = scratch / f"{runs.__name__}-{number}.json"
            running[_forked(functools.partial(work, mutant), out)] = mutant, out
        pid, status = os.wait()
        mutant, out = running.pop(pid)
        if out.exists():
            failed = json.loads(out.read_text())
            yield mutant, failed[0] if failed else None
        else:
            yield mutant, f"no end after {SECONDS} s, or a crash (signal {os.WTERMSIG(status)})"


def sound(tests: set[str], scratch: pathlib.Path) -> set[str]:
    """Those of some tests that pass without a mutant."""
    known = sorted(test for test in tests if "::" in test and not test.endswith(" (import)"))
    if not known:
        return tests
    out = scratch / "sound.json"
    os.waitpid(_forked(lambda: _run([known], first=False), out), 0)
    return tests - set(json.loads(out.read_text()))


def identity(mutant: Mutant) -> str:
    """What a file of `--resume` calls a mutant: its place, in bytes, and its change."""
    return f"{mutant.file}:{mutant.start}: {mutant.old} -> {mutant.new}"


def _imported() -> None:
    """Imports what is slow to import, before processes are forked; no device is used."""
    import jax.numpy  # noqa: F401
    import optax  # noqa: F401
    import pytest  # noqa: F401
    import scipy.stats  # noqa: F401
    from flax import linen, nnx  # noqa: F401


def judged(
    mutants: list[Mutant], workers: int, scratch: pathlib.Path, resume: pathlib.Path
) -> dict[Mutant, str | None]:
    """What found each mutant; `resume` has what is known, and gets what becomes known."""
    known: dict[str, list] = {}  # the test that found it, if any, and whether all have run
    if resume.exists():
        for line in resume.read_text().splitlines():
            which, *known[which] = json.loads(line)
    resume.parent.mkdir(parents=True, exist_ok=True)
    with resume.open("a") as file:
        for runs, before in ((near, None), (whole, [None, False])):
            left = [mutant for mutant in mutants if known.get(identity(mutant)) == before]
            for mutant, found in judge(left, runs, workers, scratch):
                known[identity(mutant)] = [found, runs is whole]
                file.write(json.dumps([identity(mutant), found, runs is whole]) + "\n")
                file.flush()
                if found or runs is whole:
                    print(f"{mutant.name}: {found or 'SURVIVES'}", flush=True)
    return {mutant: known[identity(mutant)][0] for mutant in mutants}


def main(arguments: list[str] | None = None) -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", action="append", help="FILE, or FILE:LINE; all of its mutants")
    parser.add_argument(
        "--resume", type=pathlib.Path, help="a file of what is known, which grows with each mutant"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    chosen = parser.parse_args(arguments)
    every = list(places())
    if chosen.only:
        mutants = [m for m in every if {m.file, f"{m.file}:{m.line}"} & set(chosen.only)]
    else:
        mutants = sorted(random.Random(chosen.seed).sample(every, min(chosen.count, len(every))))
    print(f"{len(mutants)} of {len(every)} mutants, seed {chosen.seed}", flush=True)
    if not covered.fresh():
        print("no map of the tests that ran a line, or an old one: run python -m tests.covered")
    if chosen.list:
        print("\n".join(mutant.name for mutant in mutants))
        return
    reasons = json.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}
    started = time.time()
    _imported()
    with tempfile.TemporaryDirectory() as name:
        scratch = pathlib.Path(name)
        resume = chosen.resume or scratch / "judged.jsonl"
        found_by = judged(mutants, chosen.workers, scratch, resume)
        tests = {test for test in found_by.values() if test is not None}
        passing = sound(tests, scratch)
    for test in sorted(tests - passing):
        print(f"{test} fails without a mutant, too, and so has found nothing")
    survivors, equivalent = [], 0
    for mutant in sorted(mutants):
        if found_by[mutant] in passing:
            continue
        reason = reasons.get(mutant.key((ROOT / mutant.file).read_text()))
        if reason is None:
            survivors.append(mutant)
        else:
            equivalent += 1
            print(f"{mutant.name}: equivalent: {reason}")
    count = len(mutants) - equivalent
    killed = count - len(survivors)
    print(
        f"{killed} of {count} killed ({killed / max(count, 1):.1%}), {equivalent} equivalent, "
        f"{time.time() - started:.0f} s"
    )
    for mutant in survivors:
        print(f"  survives: {mutant.key((ROOT / mutant.file).read_text())}")
    sys.exit(killed < 0.95 * count)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
