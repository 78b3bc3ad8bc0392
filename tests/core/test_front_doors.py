"""Each way in, once, from end to end with the shipped tiny models."""

import json
import pathlib
import runpy

import pytest
import table_pair
import trained
from command_line import PAIR, ROOT, TINY, run

import specjax

DOORS = {
    "library": "test_front_doors.py::test_library_and_command",
    "command": "test_front_doors.py::test_library_and_command",
    "trainer": "test_front_doors.py::test_trainer",
    "notebook": "test_front_doors.py::test_notebook",
    "server": "test_front_door_server.py::test_server",
    "clients of other servers": "test_serve_http.py::test_openai_client",
    "an own model": "test_adapters_decode.py::test_generate_takes_a_model_of_ones_own",
    "an own proposer": "test_examples.py::test_a_proposer_of_ones_own",
    "an own rule": "test_examples.py::test_a_rule_of_ones_own",
}
"""Door -> the test that goes through it."""


@pytest.mark.parametrize("door", DOORS)
def test_every_door_has_a_test(door):
    file, name = DOORS[door].split("::")
    assert f"\ndef {name}(" in (pathlib.Path(__file__).parent / file).read_text()


def test_library_and_command(capsys):
    """`generate` with a draft model, and `specjax generate`: the text of plain decoding, greedily
    and at temperature 1, with fewer passes."""
    target, draft = (specjax.load(TINY / name) for name in ("target", "draft"))
    prompt = ["def main("]
    for settings in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
        options = {"max_new_tokens": 24, **settings}
        plain = specjax.generate(target, prompt, proposer="none", **options)
        fast = specjax.generate(target, prompt, draft=draft, num_drafts=2, **options)
        assert fast.tokens == plain.tokens and fast.text == plain.text
        assert fast.stats.target_passes < plain.stats.target_passes
    arguments = ["--proposer", "draft", "--num-drafts", 2, "--max-new-tokens", 24]
    arguments += ["--temperature", 1, "--seed", 3, "--json"]
    told = json.loads(run(capsys, "generate", *prompt, *PAIR, *arguments).out)
    assert told["text"] == plain.text and told["tokens"] == plain.tokens
    assert told["stats"]["same_tokens"] is True
    assert told["stats"]["target_passes"] == fast.stats.target_passes


def test_trainer(tmp_path, capsys):
    """`specjax train pretrain` writes a folder that loads, drafts, and has learned something."""
    command = ["--data", str(trained.text()), "--out", str(tmp_path), *trained.SIZES]
    run(capsys, "train", "pretrain", *command, "--steps", "6", "--eval-every", "3",
        "--log-every", "3", "--save-every", "6", "--warmup-steps", "1",
        "--learning-rate", "0.01")  # fmt: skip
    losses = [line["loss"] for line in trained.metrics(tmp_path) if "loss" in line]
    assert losses[-1] < losses[0]
    made = specjax.load(tmp_path / "model")
    assert specjax.generate(made, ["def f("], max_new_tokens=4, proposer="none").tokens[0]


def test_notebook(monkeypatch, capsys):
    """The cells of the quickstart print that speculation changes no token, and draw two lines.
    Table models stand for the checkpoint, on which `tests/product/test_colab.py` runs them."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    lines = []
    monkeypatch.setattr(pyplot, "show", lambda: lines.extend(pyplot.gca().lines))
    shipped = specjax.shipped
    monkeypatch.setattr(specjax, "shipped", lambda name: shipped(name.replace("pycode", "tiny")))
    table_pair.stand_in(monkeypatch, TINY)
    runpy.run_path(str(ROOT / "colab" / "quickstart.py"), run_name="__main__")
    told = capsys.readouterr().out
    assert told.count("same: True") == 2 and "the same tokens: True" in told
    assert len(lines) == 2 and all(len(line.get_xydata()) == 5 for line in lines)
    pyplot.close("all")
