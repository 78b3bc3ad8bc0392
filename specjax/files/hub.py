"""Finds a model's folder: on this machine, or downloaded into the Hugging Face Hub's cache."""

from __future__ import annotations

import os
import pathlib

from specjax._internal.checks import shown
from specjax._internal.extras import need
from specjax.files.folder import INDEX, SINGLE, check_links, shard_names

TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
SLOW_TOKENIZER = (
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "vocab.json",
    "merges.txt", "vocab.txt",
)  # fmt: skip
"""Tokenizers in older formats, which are refused by name."""

MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of a LoRA, as PEFT names them."""


def find_folder(path: str | os.PathLike[str], revision: str | None = None) -> pathlib.Path:
    """Returns the folder of a model.

    Args:
      path: a folder, a GGUF file, or `org/name` on the Hub.  The network is never used for a folder
        that exists, or for a string that looks like a path.
      revision: a branch, tag or commit on the Hub; by default `main`.

    Raises:
      ValueError, OSError: there is no such folder or model; the message has the fix.
    """
    if not isinstance(path, str | os.PathLike) or "\0" in os.fspath(path):
        raise ValueError(f"path={shown(path)}; pass a folder, or org/name for a model of the Hub")
    folder = pathlib.Path(path)
    if folder.is_dir() or (folder.suffix == ".gguf" and folder.is_file()):
        if revision is not None:
            raise ValueError(
                f"revision={revision!r} is for models of the Hub, and {folder} is here: drop it"
            )
        if folder.is_dir():
            check_links(folder)
        return folder
    if not isinstance(path, str) or not _is_name(path):
        raise FileNotFoundError(
            f"{path} is not a folder; pass one that holds config.json and {SINGLE}, or org/name "
            "for a model of the Hub"
        )
    return _download(path, revision)


def _is_name(path: str) -> bool:
    """Returns whether a name looks like `org/name`."""
    return (
        path.count("/") == 1
        and not path.startswith((".", "/", "~"))
        and not path.endswith("/")
        and "\\" not in path
    )


def _download(name: str, revision: str | None) -> pathlib.Path:
    need("huggingface_hub", f"{name} is not a folder here, and fetching it from the Hub", "hub")
    import huggingface_hub
    from huggingface_hub import errors

    def fetch(files: list[str], revision: str | None) -> pathlib.Path:
        return pathlib.Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=files)
        )

    told: dict[type[Exception], tuple[type[OSError], str]] = {
        errors.GatedRepoError: (
            PermissionError,
            f" is gated: accept its conditions at https://huggingface.co/{name}, then log in with "
            "`hf auth login`",
        ),
        errors.RevisionNotFoundError: (
            FileNotFoundError,
            f" has no revision {revision!r} on the Hub",
        ),
        errors.RepositoryNotFoundError: (
            FileNotFoundError,
            " is neither a folder here nor a model of the Hub that you may read: check its "
            "spelling, or log in with `hf auth login`",
        ),
        errors.LocalEntryNotFoundError: (
            FileNotFoundError,
            f"{f' at {revision}' if revision else ''} is not a folder here, not (wholly) in the "
            "Hub's cache, and the Hub is out of reach: go online and unset HF_HUB_OFFLINE, or "
            "pass a local folder",
        ),
    }
    try:
        # Fetch the small files first: some models have several sets of weights, and the index says
        # which files are needed.
        small = ("config.json", "generation_config.json", ADAPTER_CONFIG, INDEX)
        folder = fetch([*small, *TOKENIZER, *SLOW_TOKENIZER], revision)
        weights = shard_names(folder / INDEX) if (folder / INDEX).exists() else [SINGLE]
        if (folder / ADAPTER_CONFIG).exists() and not (folder / "config.json").exists():
            weights = [ADAPTER_WEIGHTS]
        return (
            folder
            if all((folder / file).exists() for file in weights)
            else fetch([*weights, MEDUSA_WEIGHTS], folder.name)
        )
    except tuple(told) as error:
        kind, text = next(words for of, words in told.items() if isinstance(error, of))
        raise kind(f"{name}{text}") from None
