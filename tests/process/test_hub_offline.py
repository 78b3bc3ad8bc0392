"""Models of the Hub's cache, in a process without a network."""

import fnmatch
import json
import os
import shutil
import subprocess
import sys

import folders
import pytest

import specjax

SHA, OLD = "a" * 40, "b" * 40

_SCRIPT = """
import json, socket, sys
asked = []
def refuse(*arguments, **_):
    asked.append(str(arguments[0]))
    raise OSError("no network in tests")
socket.getaddrinfo = refuse
import specjax
found = {}
for name, revision in json.loads(sys.argv[1]):
    try:
        model = specjax.load(name, revision=revision)
        found[f"{name}@{revision}"] = [model.name, list(model.eos), model.num_params]
    except Exception as error:
        found[f"{name}@{revision}"] = [type(error).__name__, str(error)]
print(json.dumps({"found": found, "asked": asked}))
"""


@pytest.fixture
def cache(tmp_path):
    """A cache as huggingface_hub lays it out, with a model with two commits and an incomplete
    download."""
    root = tmp_path / "cache"
    for name, commit, files in (
        ("cat", SHA, ("*",)),
        ("cat", OLD, ("*",)),
        ("half", SHA, ("*.json",)),
    ):
        home = root / f"models--tiny--{name}"
        snapshot = home / "snapshots" / commit
        shutil.copytree(folders.target(), snapshot)
        for file in list(snapshot.iterdir()):
            if not any(fnmatch.fnmatch(file.name, pattern) for pattern in files):
                file.unlink()
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / "main").write_text(SHA)
    folders.edit(
        root / "models--tiny--cat" / "snapshots" / OLD, "generation_config.json", eos_token_id=9
    )
    (root / "models--tiny--cat" / "refs" / "v1").write_text(OLD)
    return root


@pytest.mark.parametrize("offline", ["1", "0"], ids=["offline", "unreachable"])
def test_the_cache_serves_without_a_network(cache, offline):
    """Models are found by name, branch and commit; missing or incomplete ones give an error,
    even offline."""
    names = [("tiny/cat", None), ("tiny/cat", "v1"), ("tiny/cat", "v2"), ("tiny/dog", None)]
    if (
        offline == "1"
    ):  # without a network, huggingface_hub retries for half a minute if it knows the commit
        names += [("tiny/cat", OLD), ("tiny/half", None)]
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": offline}
    command = [sys.executable, "-c", _SCRIPT, json.dumps(names)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    outcomes = result["found"]
    number = specjax.load(folders.target()).num_params
    assert outcomes["tiny/cat@None"] == ["tiny/cat", [0], number]
    assert (
        outcomes["tiny/cat@v1"]
        == outcomes.get(f"tiny/cat@{OLD}", outcomes["tiny/cat@v1"])
        == ["tiny/cat", [9], number]
    )
    for name in ("tiny/cat@v2", "tiny/dog@None"):
        kind, message = outcomes[name]
        assert kind == "FileNotFoundError", outcomes[name]
        assert name.split("@")[0] in message and "cache" in message and "HF_HUB_OFFLINE" in message
    if (
        offline == "1"
    ):  # older versions do not know that the download is incomplete, so the folder check finds it
        kind, message = outcomes["tiny/half@None"]
        assert kind == "FileNotFoundError" and (
            "model.safetensors" in message or "not (wholly)" in message
        )
    assert bool(result["asked"]) == (offline == "0")
