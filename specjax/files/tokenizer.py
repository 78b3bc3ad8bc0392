"""Reads the tokenizer of a folder.

Some damaged files make the tokenizers library panic, or allocate without end.  So a tokenizer is
first built and used in a process with limits.

A special token in a text, such as <|im_start|>, gets one id only if the tokenizer has it as an
*added* token.  `tokenizer.json` lists those, and the other files of a folder may name more:

    tokenizer_config.json     added_tokens_decoder {id: token}, bos_token, eos_token, ...
    special_tokens_map.json   bos_token, eos_token, ..., which count before those of the first file
    added_tokens.json         {token: id}

The last two are of an older layout, and are read if the first has no added_tokens_decoder.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from typing import Any

import tokenizers

from specjax._internal.checks import shown
from specjax._internal.fields import Kind, is_whole, parse_object
from specjax.files.folder import named, read_bytes, read_json
from specjax.files.hub import SLOW_TOKENIZER
from specjax.models import Config
from specjax.text import SPECIAL_TOKENS, ask, no_panic

_CURE = "download it again, or write it anew with transformers"
_SWITCHES = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _is_object(token: object) -> bool:
    return (
        isinstance(token, dict)
        and isinstance(token.get("content"), str)
        and all(isinstance(token.get(switch, False), bool) for switch in _SWITCHES)
    )


_OBJECT = Kind(
    f'a text, or an object with a text "content" and {", ".join(_SWITCHES)} that are true or false',
    _is_object,
)
_TOKENS = Kind("a list of tokens", lambda value: isinstance(value, list))
_ID = Kind("the id of a token, a whole number", is_whole)
_BY_ID = Kind(
    "an object that maps ids to tokens",
    lambda value: isinstance(value, dict) and all(name.isdecimal() for name in value),
)

_Token = dict[str, Any]
"""An entry of `added_tokens` in tokenizer.json, without its id."""

_tried: set[bytes] = set()
"""Digests of the files that were built without harm."""


def read_tokenizer(
    path: str | os.PathLike[str], vocab_size: int | None = None
) -> tokenizers.Tokenizer:
    """Reads a `tokenizer.json`, with truncation and padding switched off.

    The file may hold settings for both, left over from an earlier call of the tokenizer.  They
    would silently cut or pad a prompt.  transformers ignores them as well, unless a call sets them.

    Tokens that other files of its folder name are added, as transformers adds them.

    Args:
      path: the file.
      vocab_size: rows of the embedding.  A new token with an id of `vocab_size` or more is left
        out, since the model cannot read it; None: no token is left out.

    Raises:
      ValueError: the file is not a tokenizer, or building it takes too long or too much memory; or
        another file names a token in a form that is not known.
      OSError: it is missing or cannot be read.
    """
    path = pathlib.Path(path)
    content = read_bytes(path)
    tokenizer = _build(path, content)
    found = {token.content: _entry(token) for token in _added(tokenizer).values()}
    news = _missing(tokenizer, _named_tokens(path.parent, found), vocab_size)
    if not news:
        return tokenizer
    fields = parse_object(content, path)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    old = [token for token in fields.get("added_tokens") or [] if token["content"] not in news]
    free = 1 + max(ids.values(), default=-1)  # the library gives new tokens ids of its own
    new = [{"id": ids.get(text, free), **token} for text, token in news.items()]
    return _build(path, json.dumps({**fields, "added_tokens": old + new}).encode())


def _build(path: pathlib.Path, content: bytes) -> tokenizers.Tokenizer:
    digest = hashlib.sha256(content).digest()
    if digest not in _tried:
        refusals = {"refused": f"cannot be built ({{}}): {_CURE}"}
        ask("tokenizers", f"the tokenizer {path}", _CURE, content, refusals)
        _tried.add(digest)
    with no_panic(f"{path} is not a tokenizer"):
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


def _added(tokenizer: tokenizers.Tokenizer) -> dict[int, tokenizers.AddedToken]:
    return tokenizer.get_added_tokens_decoder()


def _entry(token: tokenizers.AddedToken) -> _Token:
    return {"content": token.content, **{name: getattr(token, name) for name in _SWITCHES}}


def _missing(
    tokenizer: tokenizers.Tokenizer, wanted: list[_Token], vocab_size: int | None
) -> dict[str, _Token]:
    """Returns the tokens to add, by text, without those that have no row of the embedding."""
    ids = tokenizer.get_vocab(with_added_tokens=True)
    size = tokenizer.get_vocab_size(with_added_tokens=False)
    free, news = max([size, *(i + 1 for i in _added(tokenizer))]), {}
    for token in wanted:
        known = token["content"] in ids
        if known or vocab_size is None or free < vocab_size:
            free += not (known or token["content"] in news)
            news[token["content"]] = token
    return news


def _named_tokens(folder: pathlib.Path, found: dict[str, _Token]) -> list[_Token]:
    """Returns the tokens that the other files of a folder name, unless they are `found` already.

    The order is that of transformers, since it decides the ids of new tokens.
    """
    fields = _object(folder / "tokenizer_config.json")
    with named(folder):
        by_id = fields.get("added_tokens_decoder")
        if by_id is None:
            fields |= _object(folder / "special_tokens_map.json")
        by_name = [*map(_special, *_named_fields(fields))]
        special = {token["content"] for token in by_name}
        if by_id is None:
            pairs = _object(folder / "added_tokens.json")
            listed = [_token(text, text, text in special) for text in _in_order(pairs)]
            listed = [token for token in listed if token["content"] not in found]
        else:
            listed = _by_id(by_id)
    wanted = {token["content"]: token for token in listed if found.get(token["content"]) != token}
    for text in special & set(wanted):
        wanted[text] = {**wanted[text], "special": True}
    known = {*found, *wanted}
    wanted |= {token["content"]: token for token in by_name if token["content"] not in known}
    return [token for text, token in wanted.items() if text]


def _object(file: pathlib.Path) -> Config:
    """Returns the JSON object in a file; {} if there is no such file."""
    return read_json(file) if file.exists() else {}


def _named_fields(fields: Config) -> tuple[list[str], list[object]]:
    """Returns the names of the fields that name special tokens, each with its token."""
    order = [*SPECIAL_TOKENS, *(name for name in fields if name not in SPECIAL_TOKENS)]
    pairs = [(name, fields.get(name)) for name in order if _is_named(name, fields.get(name))]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = fields.get(name) or []
        more = list(more.values()) if isinstance(more, dict) else more
        pairs += [(name, value) for value in _TOKENS.of(name, more)]
    return [name for name, _ in pairs], [value for _, value in pairs]


def _is_named(name: str, value: object) -> bool:
    """Returns whether a field names a special token, a common or an extra one."""
    if name in SPECIAL_TOKENS:
        return value is not None
    return name.endswith("_token") and isinstance(value, str)


def _in_order(ids: Config) -> list[str]:
    """Returns the tokens of added_tokens.json in the order of their ids."""
    for text, number in ids.items():
        _ID.of(f"the id of {shown(text)} in added_tokens.json", number)
    return sorted(ids, key=lambda text: ids[text])


def _by_id(tokens: object) -> list[_Token]:
    """Returns the tokens of an added_tokens_decoder in the order of their ids."""
    by_id: dict[str, object] = _BY_ID.of("added_tokens_decoder", tokens)
    order = sorted(by_id, key=int)
    return [_token("added_tokens_decoder", by_id[name], False) for name in order]


def _special(name: str, value: object) -> _Token:
    return {**_token(name, value, True), "special": True}


def _token(name: str, value: object, special: bool) -> _Token:
    """Returns a token that the field `name` gives as a text, or as an object with its switches."""
    token: Any = {"content": value} if isinstance(value, str) else _OBJECT.of(name, value)
    special = token.get("special", special)
    by_default = dict.fromkeys(_SWITCHES, False) | {"special": special, "normalized": not special}
    return {"content": token["content"], **by_default} | {
        name: token[name] for name in _SWITCHES if name in token
    }


def find_tokenizer(folder: pathlib.Path, vocab_size: int) -> tokenizers.Tokenizer | None:
    """Returns the tokenizer of a model's folder, or None.

    Raises:
      ValueError: as `read_tokenizer`; it is in an older format, or that of another model.
      OSError: it cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        old = [name for name in SLOW_TOKENIZER if (folder / name).exists()]
        if old:
            raise ValueError(
                f"{folder} has a tokenizer in an older format ({', '.join(old)}) and no "
                "tokenizer.json; write one with transformers: "
                f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
            )
        return None
    return _fitting(read_tokenizer(path, vocab_size), path, vocab_size)


def tokenizer_inside(file: pathlib.Path, content: bytes, vocab_size: int) -> tokenizers.Tokenizer:
    """Returns the tokenizer that a file of weights has inside, as the `content` of a
    tokenizer.json.

    Raises:
      ValueError: as `read_tokenizer`; it is that of another model.
    """
    return _fitting(_build(file, content), file, vocab_size)


def _fitting(
    tokenizer: tokenizers.Tokenizer, path: pathlib.Path, vocab_size: int
) -> tokenizers.Tokenizer:
    """Returns a tokenizer whose ids have rows in the embedding."""
    # Added tokens may be outside the embedding (Gemma 3's image token is); `generate` refuses their
    # ids.
    greatest = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=0)
    if greatest >= vocab_size:
        raise ValueError(
            f"{path} has token ids up to {greatest}, and the embedding only {vocab_size} rows: it "
            "is the tokenizer of another model"
        )
    return tokenizer
