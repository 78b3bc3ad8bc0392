"""`specjax datastore build` and `info`: make and describe a corpus for the proposer `datastore`."""

from __future__ import annotations

import dataclasses
import json
import pathlib

from specjax.files import find_folder, read_tokenizer
from specjax.methods import (
    Datastore,
    describe_datastore,
    load_datastore,
    predict_size,
    save_datastore,
    text_files,
)
from specjax.options.choice import chosen
from specjax.options.command import parse
from specjax.options.exits import say
from specjax.options.fields import REQUIRED, Options, option
from specjax.options.waiting import progress
from specjax.text import vocabulary_digest

ACTIONS = {"build": "build one", "info": "describe one"}


@dataclasses.dataclass(frozen=True)
class BuildOptions(Options):
    """The texts, and the datastore."""

    group = "datastore"

    data: tuple[str, ...] = option(
        REQUIRED, "files or folders of UTF-8 text; files of token ids end in .bin or .npy",
        positional=True,
    )  # fmt: skip
    tokenizer: str = option(REQUIRED, "the target's folder, or org/name on the Hub")
    out: str = option(REQUIRED, "folder to write")
    pattern: str = option("*", "glob pattern of the files below a folder")
    exclude: tuple[str, ...] = option((), "folders to leave out, by name", metavar="NAME")
    capacity: int | None = option(
        None, "the most tokens that it can hold when it grows; default: the next power of two"
    )
    json: bool = option(False, "print one JSON object and nothing else")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data:
            raise ValueError("pass the files or folders of text of which the datastore is built")


@dataclasses.dataclass(frozen=True)
class InfoOptions(Options):
    """The datastore that is described."""

    group = "datastore"

    folder: str = option(REQUIRED, "what `build` wrote", positional=True)
    tokenizer: str | None = option(None, "check that it was built with the tokenizer of a target")
    json: bool = option(False, "print one JSON object and nothing else")


def main(prog: str, argv: list[str]) -> None:
    name, rest = chosen(prog, "action", ACTIONS, argv, "Build a datastore, or describe one.")
    if name == "build":
        _build(parse(BuildOptions, rest, _build.__doc__, f"{prog} build"))
    else:
        _info(parse(InfoOptions, rest, _info.__doc__, f"{prog} info"))


def _build(arguments: BuildOptions) -> None:
    """Tokenise a corpus, sort it, and write it.  The size is predicted first."""
    tokenizer = read_tokenizer(find_folder(arguments.tokenizer) / "tokenizer.json")
    files = text_files([*map(pathlib.Path, arguments.data)], arguments.pattern, arguments.exclude)
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    say(f"{len(files):,} files, {predict_size(files, tokenizer, size)}")
    out = pathlib.Path(arguments.out)
    name = out.name or "datastore"
    with progress("building"):
        store = Datastore.build(files, tokenizer, capacity=arguments.capacity, name=name)
        save_datastore(out, store)
    _show(store, arguments.json)


def _info(arguments: InfoOptions) -> None:
    """Describe a datastore, and compare its file with its hash."""
    facts = describe_datastore(arguments.folder)
    if arguments.tokenizer is not None:
        tokenizer = read_tokenizer(find_folder(arguments.tokenizer) / "tokenizer.json")
        if vocabulary_digest(tokenizer) != facts["vocabulary"]:
            raise ValueError(
                f"{arguments.folder} was built with another tokenizer than that of "
                f"{arguments.tokenizer}: build it again with that one"
            )
    _show(load_datastore(arguments.folder), arguments.json)


def _show(store: Datastore, as_json: bool) -> None:
    facts = {
        "name": store.name,
        "tokens": store.size,
        "places": len(store.order),
        "capacity": store.capacity,
        "vocab_size": store.vocab_size,
        "bytes_per_token": store.tokens.itemsize + 4,
        "device_bytes": store.nbytes,
    }
    if as_json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        print(f"  {name.replace('_', ' '):<18}{shown}")
