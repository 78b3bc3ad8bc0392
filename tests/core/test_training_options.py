"""Options of a job: files of them, and what a user reads when one is wrong."""

import pytest

from specjax.options import command as options
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
        ('{"stepps": 7}', "'stepps' is not an option of this command; is it 'steps'?"),
        ('{"zzz": 7}', "'zzz' is not an option of this command; --help-all lists them"),
        ('{"set": ["steps=7"]}', "'set' is not an option of this command"),
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


def test_options_that_are_set_beside_a_file(tmp_path):
    """`--set` wins over the file, and the command line over both; lists, switches and negative
    numbers are written as in a file."""
    (tmp_path / "options.yaml").write_text("steps: 7\nout: there\noptimizer_args: [b1=0.5]\n")
    file = ["--config", str(tmp_path / "options.yaml")]
    more = ["--set", "steps=9", "out=middle", "--set", "tensorboard=true", "batch-size=2"]
    parsed = options.parse(LoopOptions, [*file, *more, "--out", "here"])
    wanted = LoopOptions(
        steps=9, out="here", tensorboard=True, batch_size=2, optimizer_args=("b1=0.5",)
    )
    assert parsed == wanted
    parsed = options.parse(LoopOptions, [*file, "--set", "optimizer_args=[b1=0.25, 'eps=1e-6']"])
    assert parsed.optimizer_args == ("b1=0.25", "eps=1e-6")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning-rat=1", "--set learning-rat=1: 'learning-rat' is not an option of this command"),
        ("steps", "--set steps: it must be KEY=VALUE"),
        ("steps=true", "steps is True, but it is not a switch"),
        ("steps=many", "Error parsing --steps: invalid literal for int() with base 10: 'many'"),
        ("tensorboard=1", "tensorboard is 1, but it is a switch, true or false"),
    ],
)
def test_options_that_cannot_be_set(text, message, capsys):
    with pytest.raises(SystemExit):
        options.parse(LoopOptions, ["--set", text])
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
