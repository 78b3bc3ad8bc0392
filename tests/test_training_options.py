"""Options of a job: files of them, and what a user reads when one is wrong."""

import pytest

from specjax.training import options
from specjax.training.loop import LoopOptions

FILES = {
    "options.json": '{"steps": 7, "out": "there", "tensorboard": true}',
    "options.toml": 'steps = 7\nout = "there"\ntensorboard = true\n',
    "options.yaml": "steps: 7\nout: there\ntensorboard: true\n",
}


@pytest.mark.parametrize("name", FILES)
def test_options_from_a_file(tmp_path, name):
    """Options are read from the file, and the command line wins."""
    (tmp_path / name).write_text(FILES[name])
    parsed = options.parse(
        LoopOptions, ["--config", str(tmp_path / name), "--out", "here", "--batch-size", "2"]
    )
    assert parsed == LoopOptions(steps=7, out="here", tensorboard=True, batch_size=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"stepps": 7}', "'stepps' is not an option of this job"),
        ('{"steps": true}', "steps is True, but it is not a switch"),
        ('{"steps": 0}', "--steps is 0; it must be at least 1"),
        ("[1]", "holds a list"),
        ("{", "options.json: "),
    ],
)
def test_a_bad_file_of_options(tmp_path, text, message, capsys):
    """The error names the file and its fault."""
    (tmp_path / "options.json").write_text(text)
    with pytest.raises(SystemExit):
        options.parse(LoopOptions, ["--config", str(tmp_path / "options.json")])
    assert message in capsys.readouterr().err


def test_what_a_user_can_mend_is_one_message(capsys):
    """User errors print one message, and bugs a traceback."""

    def refuse():
        raise ValueError("--steps is 0; it must be at least 1")

    def fail():
        raise AssertionError

    with pytest.raises(SystemExit, match="2"):
        options.run(refuse)
    assert capsys.readouterr().err.endswith(": --steps is 0; it must be at least 1\n")
    with pytest.raises(AssertionError):
        options.run(fail)


def test_a_kind_of_file_that_is_not_read(tmp_path, capsys):
    """Unknown kinds of files and missing files are refused."""
    (tmp_path / "options.ini").write_text("steps=7")
    for name, message in [
        ("options.ini", "must end in .yaml, .toml or .json"),
        ("none.json", "No such file"),
    ]:
        with pytest.raises(SystemExit):
            options.parse(LoopOptions, ["--config", str(tmp_path / name)])
        assert message in capsys.readouterr().err
