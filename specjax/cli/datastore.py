"""`specjax datastore build` and `info`: make and describe a corpus for the proposer `datastore`."""

from __future__ import annotations

import argparse
import json
import pathlib

from specjax.files import find_folder, read_tokenizer
from specjax.flags import progress, say
from specjax.methods import (
    Datastore,
    describe_datastore,
    load_datastore,
    predict_size,
    save_datastore,
    text_files,
)
from specjax.text import vocabulary_digest

HELP = "build a datastore of texts for the proposer datastore, or describe one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    build = actions.add_parser("build", help="build one", description=_build.__doc__)
    build.add_argument(
        "data",
        nargs="+",
        type=pathlib.Path,
        help="files or folders of UTF-8 text; files of token ids end in .bin or .npy",
    )
    build.add_argument(
        "--tokenizer", required=True, help="the target's folder, or org/name on the Hub"
    )
    build.add_argument("--out", required=True, type=pathlib.Path, help="folder to write")
    build.add_argument(
        "--pattern", default="*", help="glob pattern of the files below a folder (default: *)"
    )
    build.add_argument(
        "--exclude", nargs="+", default=[], metavar="NAME", help="folders to leave out, by name"
    )
    build.add_argument(
        "--capacity",
        type=int,
        help="the most tokens that it can hold when it grows; default: the next power of two",
    )
    info = actions.add_parser("info", help="describe one", description=_info.__doc__)
    info.add_argument("folder", help="what `build` wrote")
    info.add_argument("--tokenizer", help="check that it was built with the tokenizer of a target")
    for action in (build, info):
        action.add_argument(
            "--json", action="store_true", help="print one JSON object and nothing else"
        )


def run(arguments: argparse.Namespace) -> None:
    _build(arguments) if arguments.action == "build" else _info(arguments)


def _build(arguments: argparse.Namespace) -> None:
    """Tokenise a corpus, sort it, and write it.  The size is predicted first."""
    tokenizer = read_tokenizer(find_folder(arguments.tokenizer) / "tokenizer.json")
    files = text_files(arguments.data, arguments.pattern, arguments.exclude)
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    say(f"{len(files):,} files, {predict_size(files, tokenizer, size)}")
    name = arguments.out.name or "datastore"
    with progress("building"):
        store = Datastore.build(files, tokenizer, capacity=arguments.capacity, name=name)
        save_datastore(arguments.out, store)
    _show(store, arguments.json)


def _info(arguments: argparse.Namespace) -> None:
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
