"""The fuzzer sees every kind of break, and a short campaign finds none in the library."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]

_PLANTED = """
from tests.fuzz import law
from tests.fuzz.__main__ import Campaign
law.SECONDS = 12.0
campaign = Campaign()
campaign.run("planted", 0, 300.0, most=13)
for failure in campaign.failures:
    print(*failure)
print(dict(campaign.counts["planted"]))
"""

_SEEN = [
    "0 raw KeyError", "1 nameless it is wrong", "2 a message of 100005 characters",
    "3 opens /etc/hostname", "4 executes subprocess.Popen", "5 executes os.system", "6 memory",
    "7 broken the model is broken", "8 ends its process (-6)", "9 hangs",
    "10 works, and should be refused",
]  # fmt: skip


def test_every_break_is_seen():
    """Cases that break each part of the law are counted with their seeds, and the rest goes on."""
    done = subprocess.run(
        [sys.executable, "-c", _PLANTED], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    *failures, counts = done.stdout.splitlines()
    assert len(failures) == len(_SEEN), done.stdout
    for line, seen in zip(failures, _SEEN, strict=True):
        assert line.startswith(f"planted {seen}"), line
    assert counts == "{'breaks the law': 11, 'works': 1, 'refused': 1}"


def test_a_short_campaign():
    """A hundred cases of every kind, the same everywhere: each is refused by name or works."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--seconds", "1000", "--cases", "100"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", done.stdout, re.M)
    assert len(rows) == 10
    for kind, cases, refused, works, broken in rows:
        assert int(cases) == int(refused) + int(works) == (900 if kind == "all" else 100), kind
        assert int(broken) == 0, kind


def test_one_case_is_reproduced():
    """A case is run again by its kind and seed, with the outcome that the campaign saw."""
    command = [sys.executable, "-m", "tests.fuzz", "--case", "templates:7"]
    first, second = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        for _ in range(2)
    )
    assert first.stdout == second.stdout != ""
    assert first.stdout.splitlines()[-1] in ("refused", "works")
    wrong = subprocess.run([*command[:-1], "x:1"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 2 and "KIND:SEED" in wrong.stderr
