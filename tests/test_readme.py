"""The README and the docs are true: their Python runs here, their shell commands run in
`.ci/run`."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = {
    page: page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
BLOCKS = [
    block
    for text in PAGES.values()
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n", 1)[0])
def test_python_runs(block):
    """Each block runs alone from the root of the checkout, as a reader would paste it."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_there_are_blocks():
    """Without any code blocks the tests above would pass for nothing."""
    assert len(BLOCKS) >= 2


def test_links_lead_somewhere():
    """Relative links name files of the checkout."""
    for page, text in PAGES.items():
        for link in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", text):
            assert (page.parent / link).exists(), (page, link)
