"""Checks of an installed specjax without its optional packages: run it outside of a checkout."""

import contextlib
import importlib.metadata
import io
import json
import pathlib
import subprocess
import sys

import specjax
from specjax.cli import COMMANDS, main

HOME = pathlib.Path(specjax.__file__).parent


def ends(*arguments: str) -> tuple[int, str]:
    """The exit status of a command, and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main(list(arguments))
        except SystemExit as end:
            return int(end.code or 0), printed.getvalue()
    return 0, printed.getvalue()


# Of the project, `specjax` alone is installed: `train` and `tests` are too common as names.
files = importlib.metadata.files("specjax") or []
tops = {file.parts[0] for file in files} - {"..", f"specjax-{specjax.__version__}.dist-info"}
assert tops == {"specjax"} and HOME.parent.name == "site-packages", (tops, HOME)

# Options of every command, and of a job of training.
for words in [*([name] for name in COMMANDS), ["train", "distill"]]:
    status, text = ends(*words, "--help")
    assert status == 0 and text.startswith(f"usage: specjax {words[0]}"), (words, text)
assert ends("--version") == (0, f"specjax {specjax.__version__}\n")

# What needs an optional package names it, and never a package `specjax` of an index.
for words in (["serve"], ["generate", "x", "--regex", "a+"]):
    status, text = ends(*words)
    assert status == 2 and "pip install '" in text and "install specjax" not in text, text
    assert text.count("\n") == 1 and "specjax[" not in text, text

# The command itself, on folders that are given and on the shipped pair.
command = str(pathlib.Path(sys.executable).parent / "specjax")
folders = [f"--{name}={specjax.shipped(f'tiny/{name}')}" for name in ("target", "draft")]
for options in ([*folders, "--proposer=draft"], ["--proposer=ngram"]):
    done = subprocess.run(
        [command, "generate", "def f(", "--max-new-tokens=8", "--json", *options],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["stats"]["same_tokens"] is True, done.stdout
print(f"specjax {specjax.__version__}: installed from its wheel, its commands work")
