"""`load("org/name")`: the Hub's cache and its offline behaviour; folders never touch the
network."""

import fnmatch
import shutil
import socket
import sys

import folders
import huggingface_hub
import pytest
from huggingface_hub import errors

import specjax
from specjax.files.hub import find_folder

SHA, OLD = "a" * 40, "b" * 40


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
