"""The notebooks run from end to end on the shipped checkpoints, through their jupytext twins."""

import base64
import io
import json
import pathlib
import re
import runpy

import pytest

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "colab").glob("*.py"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(notebook, tmp_path, capsys, monkeypatch):
    """Each notebook runs with few training steps, every plot that it shows has lines with points,
    and speculation changes no text.

    The notebooks share the process, so that they share what XLA has compiled;
    `tests/test_readme.py` looks up their names in a process of its own.
    """
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")

    def show():
        for axes in pyplot.gcf().axes:
            assert axes.lines and all(len(line.get_xdata()) > 1 for line in axes.lines), "empty"
        pyplot.close()

    monkeypatch.setattr(pyplot, "show", show)
    monkeypatch.setenv("SPECJAX_STEPS", "4")
    monkeypatch.setenv("SPECJAX_RUNS", str(tmp_path))
    monkeypatch.chdir(notebook.parent)
    runpy.run_path(str(notebook), run_name="__main__")
    told = capsys.readouterr().out
    assert "True" in told
    verdicts = [line for line in told.splitlines() if "same" in line and "rejection " not in line]
    assert verdicts and all("False" not in line for line in verdicts)


def test_there_are_five():
    names = {"quickstart", "distill", "medusa", "reproducible_sampling", "bring_your_own_model"}
    assert {path.stem for path in NOTEBOOKS} == names


def cells(twin):
    """The cells of a jupytext script: (is it code, its text)."""
    body = twin.read_text().split("# %%")[1:]
    for cell in body:
        head, _, text = cell.partition("\n")
        code = "[markdown]" not in head
        lines = text.strip().splitlines()
        yield (
            code,
            "\n".join(
                lines if code else [line.removeprefix("#").removeprefix(" ") for line in lines]
            ),
        )


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_its_twin(notebook):
    """Notebook and twin have the same cells, and every cell that ran shows its output without an
    error."""
    stored = json.loads(notebook.with_suffix(".ipynb").read_text())["cells"]
    wanted = list(cells(notebook))
    assert [cell["cell_type"] == "code" for cell in stored] == [code for code, _ in wanted]
    for cell, (code, text) in zip(stored, wanted, strict=True):
        source = "".join(cell["source"]).strip()
        # Jupytext writes shell and IPython commands as comments.
        commented = re.sub(r"^( *)([!%])", r"\1# \2", source, flags=re.MULTILINE)
        assert (commented if code else source) == text
    outputs = [
        output for cell in stored if cell["cell_type"] == "code" for output in cell["outputs"]
    ]
    assert outputs and not [output for output in outputs if output["output_type"] == "error"]


DRAWN = [path for path in NOTEBOOKS if "plot" in path.read_text()]


@pytest.mark.parametrize("notebook", DRAWN, ids=lambda path: path.stem)
def test_a_notebook_shows_its_pictures(notebook):
    """Pictures are stored as pictures, not as names of objects, and have colour between the
    axes."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    stored = json.loads(notebook.with_suffix(".ipynb").read_text())["cells"]
    outputs = [output.get("data", {}) for cell in stored for output in cell.get("outputs", [])]
    figures = [data for data in outputs if "Figure" in "".join(data.get("text/plain", []))]
    assert figures
    for data in figures:
        assert "image/png" in data, data
        pixels = pyplot.imread(io.BytesIO(base64.b64decode(data["image/png"])))[..., :3]
        assert (pixels.max(-1) - pixels.min(-1) > 0.3).sum() > 100, "empty axes"
