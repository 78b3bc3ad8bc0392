"""An engine with pages on a mesh of 2 x 2 devices, in a process of its own: texts under load are
those that the engine writes alone and those of `generate`, and nothing compiles after the start."""

import subprocess
import sys

from several_devices import ROOT, environment


def test_texts_do_not_depend_on_load():
    options = ["--mesh", "data=2,model=2", "--pages", "24", "--requests", "24", "--slots", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.load", *options, "--generated", "0.1"],
        cwd=ROOT, env=environment(4), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "| differences | 0 |" in done.stdout
