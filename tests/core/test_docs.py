"""The pages say what is there: names, files, options and figures that a test can read, and they are
short enough to be read."""

import ast
import builtins
import importlib.util
import pathlib
import re

import pytest
from test_floors import FLOORS

from specjax import Decoder

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
LOG = DOCS / "log.md"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
ABOUT_OTHERS = {*(DOCS / "coming-from").iterdir(), DOCS / "peers.md", DOCS / "papers.md"}
"""Pages with names of other projects."""

GUIDES = sorted([*(DOCS / "guides").iterdir(), *(DOCS / "coming-from").iterdir()])
TOPS = ("specjax", "train", "bench", "tests", "examples", "experiments", "docs", "colab")
SOURCES = {
    path: path.read_text()
    for top in TOPS
    for path in (ROOT / top).rglob("*")
    if path.suffix in (".py", ".sh") and path != pathlib.Path(__file__)
}
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
DAY = re.compile(rf"\b\d{{1,2}} ({MONTHS})\b|\b20\d\d-\d\d-\d\d\b")
CODE = re.compile(r"`([^`\n]+)`")
BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def words(*pages: pathlib.Path) -> int:
    """What has a letter or a digit: the lines of a table are no words."""
    return sum(bool(re.search(r"\w", word)) for page in pages for word in page.read_text().split())


def spans(page: pathlib.Path) -> list[str]:
    """What a page sets in backticks within its sentences and tables."""
    text = BLOCK.sub("", page.read_text())
    return CODE.findall(re.sub(r"\n(?!\n)", " ", text))  # a span may go on in the next line


def test_the_pages_are_short():
    """README is read in a few minutes, and the other pages but the lab log in an evening."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 90
    assert "```bash" in lines[:12], "the first command stands in the first lines"
    assert words(*(page for page in PAGES if page != LOG)) <= 24_000
    assert words(LOG) <= 10_000


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_is_a_screen_without_dated_runs(page):
    """What was measured on a day stands in the benchmarks or in the lab log."""
    text = page.read_text()
    assert len(text.splitlines()) <= 90
    found = DAY.search(text)
    assert found is None, f"{page.name} has the date {found and found[0]!r}"
    assert DAY.search((DOCS / "benchmarks.md").read_text()) and DAY.search(LOG.read_text())


def test_named_files_and_modules_exist():
    """Paths in backticks, and the modules of `python -m`, in sentences and in blocks."""
    checked = 0
    for page in PAGES:
        text = page.read_text()
        for path in re.findall(rf"(?<![\w/.-])(?:{'|'.join(TOPS)}|checkpoints)/[\w./*-]+\w", text):
            assert [*ROOT.glob(path)], f"{page.name} names {path}"
            checked += 1
        for module in re.findall(r"python -m ((?:train|bench|tests|experiments)[\w.]*)", text):
            module = module.rstrip(".")
            if module.rpartition(".")[2].islower():  # JOB stands for any of them
                path = ROOT.joinpath(*module.split("."))
                assert path.is_dir() or path.with_suffix(".py").exists(), f"{page.name}: {module}"
                checked += 1
    assert checked > 100


def test_named_attributes_exist():
    """`specjax.a.b` leads to something, and a call names a function or a class of the sources."""

    defined = set()
    for text in SOURCES.values():
        defined |= set(re.findall(r"(?:def|class) (\w+)", text)) | set(
            re.findall(r"^(\w+) =", text, re.M)
        )
    checked = 0
    for page in PAGES:
        for span in spans(page):
            for dotted in re.findall(r"(?<![\w./])specjax(?:\.\w+)+(?![\w.*]*/)", span):
                assert resolves(dotted), f"{page.name} names {dotted}"
                checked += 1
            called = re.match(r"(?:\w+\.)*([A-Za-z_]\w+)\(", span)
            if called and page not in ABOUT_OTHERS and page.name not in ("log.md", "serving.md"):
                assert called[1] in defined | {"help", "loads", "dumps", "replace", "initialize"}, (
                    f"{page.name} calls {called[1]}"
                )
                checked += 1
    assert checked > 60


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, or an attribute of what stands before its last dot."""
    module, thing = "specjax", importlib.import_module("specjax")
    for part in dotted.split(".")[1:]:
        module = f"{module}.{part}"
        if hasattr(thing, part):
            thing = getattr(thing, part)
        elif isinstance(thing, type(importlib)) and importlib.util.find_spec(module):
            thing = importlib.import_module(module)
        else:
            return False
    return True


def test_classes_in_backticks_are_there():
    """Words such as `BestFirst` are classes, functions or types of the library."""
    defined = {
        name
        for text in SOURCES.values()
        for name in re.findall(r"(?:class |def |^)([A-Z]\w+)", text, re.MULTILINE)
    }
    defined |= {*vars(builtins)}
    checked = set()
    for page in PAGES:
        for span in spans(page):
            if page not in ABOUT_OTHERS and re.fullmatch(
                r"[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+", span
            ):
                assert span in defined, f"{page.name} names {span}"
                checked.add(span)
    assert len(checked) > 15


def test_options_exist():
    """`--like-this` is an option of a command of this project, or stands beside its command."""
    known = {"--worker", "--ntasks-per-node"}  # of gcloud and Slurm
    for text in SOURCES.values():
        known |= set(re.findall(r"--[a-z][a-z0-9-]+", text))
        known |= {f"--{name.replace('_', '-')}" for name in re.findall(r"^ +(\w+):", text, re.M)}
    checked = 0
    for page in PAGES:
        if page not in ABOUT_OTHERS:
            for span in spans(page):
                for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", span):
                    assert option in known, f"{page.name} names {option}"
                    checked += 1
    assert checked > 150


def test_the_table_of_the_loop_is_that_of_the_code():
    """The functions of the decoder return what the page says."""
    rows = re.findall(
        r"^\| `(\w+)` \|.*\| ([^|]*) \|$", (DOCS / "concepts" / "loop.md").read_text(), re.M
    )
    said = {name: CODE.findall(returns.partition(", with")[0]) for name, returns in rows}
    assert list(said) == ["prefill", "propose", "verify", "commit"]
    for name, returns in said.items():
        annotation = getattr(Decoder, name).__annotations__["return"]
        names = annotation.removeprefix("tuple[").removesuffix("]").split(", ")
        assert returns == names, name


def test_the_floors_of_the_page_are_those_of_the_test():
    """CONTRIBUTING lists each room on its floor, and counts the floors."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("| floor | rooms |")[2].partition("\n\n")[0]
    said = {
        floor: {name.rstrip("/") for name in CODE.findall(rooms)}
        for floor, rooms in re.findall(r"^\| (\w+) \| (.*) \|$", table, re.MULTILINE)
    }
    known = {
        floor: {room.removeprefix("specjax.") for room in rooms}
        - {"specjax", "__main__", "experiments"}
        for floor, rooms in FLOORS.items()
    }
    assert said == known
    count = ["no", "one", "two", "three", "four", "five", "six", "seven"][len(FLOORS)]
    assert f"Rooms lie on {count} floors" in text


def test_counts_are_those_of_the_files():
    """The numbers of planted faults and of notebooks that pages say."""
    tree = ast.parse((ROOT / "tests" / "audit_campaign.py").read_text())
    (faults,) = (
        node.value.keys
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FAULTS"
        if isinstance(node.value, ast.Dict)
    )
    readme = (ROOT / "README.md").read_text()
    assert f"finds {len(faults)} planted faults" in readme
    assert f"finds {len(faults)} faults" in (DOCS / "guides" / "audit.md").read_text()
    assert len([*(ROOT / "colab").glob("*.ipynb")]) == 10 and "ten notebooks" in readme
