"""The README and the docs are true: their Python runs here, their shell commands run in
`.ci/run`."""

import pathlib
import re
import subprocess
import sys

import mtp_folders
import pytest

import specjax
from specjax.tuning import costs

ROOT = pathlib.Path(__file__).parents[2]
PAGES = {
    page: page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
BLOCKS = list(
    dict.fromkeys(
        block
        for text in PAGES.values()
        for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    )
)
SMALLER = {
    "Qwen/Qwen3.5-4B": mtp_folders.beside(ROOT / "checkpoints/tiny/target"),
    "checkpoints/pycode/target": "checkpoints/tiny/target",
    "checkpoints/pycode/draft": "checkpoints/tiny/draft",
}
"""Models with a third of the layers, so a third of the compilation; they stand in for the shipped
ones, and for those that a test cannot download."""


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n", 1)[0])
def test_python_runs(block, capsys, monkeypatch):
    """Each block runs alone from the root of the checkout, as a reader would paste it, and prints
    something. The blocks share the process, so that they share what XLA has compiled. A sample of
    measured costs has two steps here, since nobody looks at the figures."""
    load = specjax.load
    if not re.search("pycode/(eagle3|medusa)", block):  # these heads fit their own target alone
        monkeypatch.setattr(
            specjax, "load", lambda x, *rest, **more: load(SMALLER.get(x, x), *rest, **more)
        )
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(costs, "_STEPS", 2)
    exec(compile(block, "<block>", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_names_are_there_after_their_import():
    """In the process of the tests a name could be there because another test imported its module.
    So a process that imports `specjax` alone finds each name of the blocks and the notebooks."""
    notebooks = [twin.read_text() for twin in sorted((ROOT / "colab").glob("*.py"))]
    names = {
        name
        for text in [*BLOCKS, *notebooks]
        for name in re.findall(r"(?<!from )(?<!import )\b(specjax(?:\.[A-Za-z_]\w*)+)", text)
    }
    assert {"specjax.generate", "specjax.models.check_model"} <= names
    code = "import specjax\n" + "\n".join(sorted(names))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_there_are_blocks():
    """Without any code blocks the tests above would pass for nothing."""
    assert len(BLOCKS) >= 2


def test_links_lead_somewhere():
    """Relative links name files of the checkout, or what mkdocs makes of it.  `mkdocs build` checks
    anchors."""
    made = re.compile(r"(\.\./)?(drawings/\w+\.svg|reference/index\.md)")
    for page, text in PAGES.items():
        for link in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", text):
            assert made.fullmatch(link) or (page.parent / link).exists(), (page, link)
