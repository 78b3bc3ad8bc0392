"""The notebooks run from end to end on the shipped checkpoints, through their jupytext twins."""

import base64
import contextlib
import io
import json
import pathlib
import re
import runpy
import sys
import types

import numpy as np
import pytest

import specjax

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "colab").glob("*.py"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(notebook, tmp_path, monkeypatch):
    """Each notebook runs with few training steps, every plot that it shows has lines with points,
    and speculation changes no text.

    The notebooks share the process, so that they share what XLA has compiled;
    `tests/product/test_readme.py` looks up their names in a process of its own.
    """
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")

    drawn = []

    def show():
        check_figure(pyplot.gcf())
        drawn.append(pyplot.gcf())
        pyplot.close()

    monkeypatch.setattr(pyplot, "show", show)
    monkeypatch.setenv("SPECJAX_STEPS", "4")
    monkeypatch.setenv("SPECJAX_RUNS", str(tmp_path))
    monkeypatch.chdir(notebook.parent)
    if "pycode/eagle3" not in notebook.read_text():  # a head that fits its own target alone
        # A third of the layers, so a third of the compilation.
        shipped = specjax.shipped
        monkeypatch.setattr(
            specjax, "shipped", lambda name: shipped(name.replace("pycode", "tiny"))
        )
    # Not by `capsys`, which replaces stderr as well: when uvicorn sets up its logging, absl closes
    # every stream of its handlers that is not stderr at that time, so also that of pytest.
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names = runpy.run_path(str(notebook), run_name="__main__")
    # Figures of `specjax.plot` are values of cells, alone or in a list.
    for value in names.values():
        for each in value if isinstance(value, list) else [value]:
            if type(each).__name__ == "Figure":
                check_figure(each)
                drawn.append(each)
    assert bool(drawn) == (notebook in DRAWN)
    told = printed.getvalue()
    assert "True" in told
    verdicts = [line for line in told.splitlines() if "same" in line and "rejection " not in line]
    assert verdicts and all("False" not in line for line in verdicts)


def check_figure(figure):
    """It has axes, and lines with several finite points in each."""
    assert figure.axes, "a figure without axes"
    for axes in figure.axes:
        assert axes.lines, "axes without a line"
        for line in axes.lines:
            points = np.asarray(line.get_xydata(), float)
            assert len(points) > 1 and np.isfinite(points).all(), points


def test_quickstart_on_an_accelerator(monkeypatch):
    """There it asks for Qwen3.5 in bfloat16, because float32 would not fit, for its MTP layer, and
    for an answer without thinking; what it then passes to `generate` are fields of a request."""
    asked = []

    def load(name, dtype=None):
        asked.append((name, dtype))
        return types.SimpleNamespace(num_params=1)

    def load_mtp(target, shape, num_drafts):
        asked.append((target.num_params, shape, num_drafts))
        return types.SimpleNamespace(name="its own layer")

    monkeypatch.setattr(specjax, "load", load)
    monkeypatch.setattr(specjax, "load_mtp", load_mtp)
    monkeypatch.setattr("jax.default_backend", lambda: "tpu")
    names = {}
    for text in [text for code, text in cells(ROOT / "colab" / "quickstart.py") if code][:3]:
        exec(text, names)
    assert asked == [("Qwen/Qwen3.5-4B", "bfloat16"), (1, specjax.Chain, 8)]
    request = specjax.Request(**names["ask"])
    assert request.chat_template_kwargs == {"enable_thinking": False}
    assert request.messages[0]["role"] == "user" and request.prompts is None


def test_which_there_are():
    assert {path.stem for path in NOTEBOOKS} == {
        "bring_your_own_model", "constrain", "datastore", "distill", "eagle", "medusa",
        "quickstart", "reproducible_sampling", "serve", "write_a_drafter",
    }  # fmt: skip


def first_code(twin):
    return next(text for code, text in cells(twin) if code)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell(notebook, monkeypatch):
    """In Colab it asks for the repository's URL, and installs a release of it and not a branch;
    elsewhere it does nothing."""
    cell = first_code(notebook)
    exec(cell, {})
    assert f'RELEASE = "v{specjax.__version__}"' in cell
    assert re.search(r'install -q "specjax\[[a-z,]+\] @ git\+\{REPOSITORY\}@\{RELEASE\}"', cell)
    assert "http" not in cell
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    with pytest.raises(ValueError, match="REPOSITORY"):
        exec(cell, {})
    named = cell.replace('REPOSITORY = ""', 'REPOSITORY = "https://example.org/specjax"')
    exec(named, {})  # the line of the shell is a comment here


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


DRAWN = [path for path in NOTEBOOKS if re.search(r"pyplot|plot\.tree", path.read_text())]


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
