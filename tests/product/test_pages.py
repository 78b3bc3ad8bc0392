"""The commands of each page of the docs, in a folder of their own."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
INSTALLS = re.compile(r"^(?:python3 -m venv [^\n]*?)?pip install[^&\n]*(?:&& |\n)", re.MULTILINE)


def commands(page: pathlib.Path) -> str:
    """The commands of a page.  What it installs is installed already, and not from a copy."""
    return INSTALLS.sub("", "".join(BLOCK.findall(page.read_text())))


PAGES = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md")) if commands(p)]


@pytest.mark.parametrize("page", PAGES)
def test_its_commands_work(page, tmp_path):
    """All end with status 0."""
    for path in ROOT.iterdir():  # `runs/` is made here, and not in the checkout
        if path.name not in ("runs", ".git"):
            (tmp_path / path.name).symlink_to(path)
    script = commands(ROOT / page)
    home = pathlib.Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{home}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)  # as a user has it
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script], cwd=tmp_path, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
