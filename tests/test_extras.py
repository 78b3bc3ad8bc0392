"""What is missing is named with a command that installs it, and not another project."""

import pathlib

from specjax import extras

ROOT = pathlib.Path(__file__).parent.parent


def test_a_checkout_installs_itself(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert extras.install("hub") == "pip install -e '.[hub]'"
    monkeypatch.chdir(tmp_path)
    assert extras.install("hub") == f"pip install -e '{ROOT}[hub]'"


def test_an_installed_package_names_what_the_extra_needs(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "_ROOT", tmp_path)
    assert extras.install("constrain").startswith("pip install 'outlines")
    assert "specjax" not in extras.install("hub") and "huggingface" in extras.install("hub")


def test_no_message_and_no_page_asks_an_index_for_this_name():
    """Another project has the name there."""
    files = [p for top in ("specjax", "train", "bench", "docs", "colab") for p in
             (ROOT / top).rglob("*") if p.suffix in (".py", ".md", ".ipynb")]  # fmt: skip
    files.append(ROOT / "README.md")
    for path in files:
        text = path.read_text()
        assert "install specjax" not in text, path
        assert "install 'specjax" not in text and 'install "specjax' not in text, path
