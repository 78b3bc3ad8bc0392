"""What is missing is named with a command that installs it, and not another project."""

import pathlib
import re

import pytest

from specjax._internal import extras

ROOT = pathlib.Path(__file__).parents[2]
PAGES = (".py", ".md", ".ipynb", ".toml", ".cff")


def test_a_checkout_installs_itself(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert extras.install("hub") == "pip install -e '.[hub]'"
    monkeypatch.chdir(tmp_path)
    assert extras.install("hub") == f"pip install -e '{ROOT}[hub]'"


def test_an_installed_package_names_what_the_extra_needs(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "_ROOT", tmp_path)
    assert extras.install("constrain").startswith("pip install 'outlines")
    assert "specjax" not in extras.install("hub") and "huggingface" in extras.install("hub")


ASKS_AN_INDEX = re.compile(
    r"install\b[^\n&|;]*?[ '\"\\]specjax(?:\[[\w,]+\])?(?! @)(?=[\s'\"\\`=<>~!;,.]|$)", re.MULTILINE
)
"""An installation by the name alone, and not from a folder, a file or a repository."""


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        ("pip install specjax", True),
        ("pip install -q 'specjax[train]'", True),
        ('"!pip install -U \\"specjax[hub,plot]\\""', True),
        ("`pip install specjax`", True),
        ("pip install specjax==0.1.0", True),
        ("pip install -e .", False),
        ("pip install -e '/home/me/specjax[train]'", False),
        ("pip install ./specjax[train,plot]", False),
        ("pip install dist/specjax-0.1.0-py3-none-any.whl", False),
        ('pip install -q "specjax[hub] @ git+{REPOSITORY}@{RELEASE}"', False),
        ("what is installed of specjax", False),
    ],
)
def test_what_asks_an_index(words, asks):
    assert bool(ASKS_AN_INDEX.search(words)) == asks


def test_no_message_and_no_page_asks_an_index_for_this_name():
    """Another project has the name there."""
    tops = ("specjax", "train", "bench", "docs", "colab", "examples", "checkpoints")
    files = [path for top in tops for path in (ROOT / top).rglob("*") if path.suffix in PAGES]
    files += [path for path in ROOT.iterdir() if path.suffix in PAGES]
    assert ROOT / "README.md" in files and ROOT / "colab" / "quickstart.py" in files
    for path in files:
        found = ASKS_AN_INDEX.search(path.read_text())
        assert found is None, f"{path}: {found and found[0]}"
