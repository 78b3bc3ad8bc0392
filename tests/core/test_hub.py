"""`load("org/name")`: the Hub's cache and its offline behaviour; folders never touch the
network."""

import fnmatch
import json
import os
import shutil
import socket
import subprocess
import sys

import folders
import huggingface_hub
import pytest
from huggingface_hub import errors

import specjax
from specjax.files.hub import find_folder

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


@pytest.fixture
def unreachable(monkeypatch):
    """Any look-up of a name and any connection fails the test."""

    def touched(*arguments, **_):
        raise AssertionError(f"the network was touched: {arguments}")

    monkeypatch.setattr(socket, "getaddrinfo", touched)
    monkeypatch.setattr(socket.socket, "connect", touched)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", touched)


def test_a_folder_never_touches_the_network(unreachable, monkeypatch, tmp_path):
    """This holds for paths and for folder names that look like names on the Hub."""
    assert specjax.load(folders.wordless()).eos == (0,)
    shutil.copytree(folders.wordless(), tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert specjax.load("org/name").name == "name"


@pytest.mark.parametrize(
    "path", ["./org", "../a", "/org/name", "org/name/", "a/b/c", "~/name", "nowhere", "a\\b/c"]
)
def test_what_looks_like_a_path_is_one(unreachable, path):
    """A missing folder is named and not searched for elsewhere."""
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        specjax.load(path)


def test_revision_of_a_folder(unreachable):
    """A folder has no revisions, so the option is refused."""
    with pytest.raises(ValueError, match="revision='v1'"):
        specjax.load(folders.target(), revision="v1")


def test_without_huggingface_hub(monkeypatch):
    """The error names the extra that installs it."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"org/name.*pip install -e .*\[hub\]"):
        specjax.load("org/name")


@pytest.mark.parametrize("sharded", [False, True])
def test_only_what_is_needed_is_fetched(tmp_path, monkeypatch, sharded):
    """Pickles, code and a second set of weights are not downloaded."""
    remote, here = tmp_path / "remote", tmp_path / "snapshots" / SHA
    folders.random_llama(5).save_pretrained(
        remote, **({"max_shard_size": "60KB"} if sharded else {})
    )
    shutil.copy(folders.tokenizer_file(), remote / "tokenizer.json")
    wanted = {file.name for file in remote.iterdir()}
    for name in ("pytorch_model.bin", "modeling.py", "consolidated.safetensors", "README.md"):
        (remote / name).write_text("not wanted")
    here.mkdir(parents=True)
    revisions = []

    def download(name, revision, allow_patterns):
        assert name == "org/name"
        revisions.append(revision)
        for file in remote.iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, here)
        return str(here)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert specjax.load("org/name", revision="v1").name == "org/name"
    assert {file.name for file in here.iterdir()} == wanted
    assert revisions == ["v1", SHA], "the weights must be those of the same commit"


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("GatedRepoError", PermissionError, ["org/name", "gated", "hf auth login"]),
        (
            "RepositoryNotFoundError",
            FileNotFoundError,
            ["org/name", "neither a folder here", "spelling"],
        ),
        ("RevisionNotFoundError", FileNotFoundError, ["org/name", "'v9'"]),
    ],
)
def test_refusals_of_the_hub(monkeypatch, kind, error, words):
    """Each error says what to do."""

    def refuse(*_, **__):
        raise (kind := getattr(errors, name)).__new__(kind)

    name = kind
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(error) as caught:
        find_folder("org/name", "v9")
    assert [word for word in words if word not in str(caught.value)] == []
