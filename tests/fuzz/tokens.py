"""Cases of tokenizer.json files, and texts for those that can be read."""

from __future__ import annotations

import base64
import dataclasses
import pathlib
import random
import struct
from typing import Any

import specjax
from specjax.files import read_tokenizer
from specjax.generation.prompts import text_ids
from tests.fuzz import bases, values
from tests.fuzz.law import Case

_SEARCHES = ("(a*)*b", "((a{99}){99}){99}", "(a|aa)+$", "(", "\\p{L}+", "", "(?=a)", "(?i)x")
_PLAIN = ("NFKC", "Strip", "Lowercase", "Nmt", "BertNormalizer", "ByteLevel", "x")
_TEXTS = (
    "the cat", "a" * 40 + "c", "é中😀\u0301", "\ud800", "", "\x00\n ", "<|endoftext|>x", "A b" * 50,
)  # fmt: skip


def _replace(rng: random.Random) -> dict[str, Any]:
    pattern = {"Regex": rng.choice(_SEARCHES)}
    if rng.random() < 0.6:
        pattern = {"String": rng.choice("aé ▁")}
    return {"type": "Replace", "pattern": pattern, "content": "a" * rng.choice((1, 40, 10**4))}


def _normalizer(rng: random.Random) -> dict[str, Any]:
    act = rng.random()
    if act < 0.3:
        return _replace(rng)
    if act < 0.5:
        steps = [_replace(rng) for _ in range(rng.choice((0, 3, 12)))]
        return {"type": "Sequence", "normalizers": steps}
    if act < 0.75:
        size = struct.pack("<I", rng.choice((0, 4, 64, 2**31, 2**32 - 1)))
        table = base64.b64encode(size + rng.randbytes(rng.choice((0, 4, 64, 999))))
        return {"type": "Precompiled", "precompiled_charsmap": table.decode()}
    if act < 0.85:
        return {"type": "Prepend", "prepend": "▁" * rng.choice((1, 10**5))}
    return {"type": rng.choice(_PLAIN)}


def _pre_tokenizer(rng: random.Random) -> dict[str, Any]:
    split = {
        "type": "Split",
        "pattern": {"Regex": rng.choice(_SEARCHES)},
        "behavior": "Isolated",
        "invert": rng.random() < 0.5,
    }
    space = {"type": "Metaspace", "replacement": rng.choice(("▁", "", "xx"))}
    several = {"type": "Sequence", "pretokenizers": [split] * rng.choice((0, 2))}
    length = {"type": "FixedLength", "length": rng.choice((0, 1, 2**63))}
    return rng.choice((split, space | {"prepend_scheme": "always"}, several, length))


def _truncation(rng: random.Random) -> dict[str, Any]:
    most, stride = rng.choice((0, 1, 8, 2**63)), rng.choice((0, 1, 8, 99))
    kind = {"direction": "Right", "strategy": "LongestFirst"}
    return {**kind, "max_length": most, "stride": stride}


def _padding(rng: random.Random) -> dict[str, Any]:
    token = {"pad_id": 0, "pad_type_id": 0, "pad_token": "x", "direction": "Right"}
    multiple = rng.choice((None, 0, 2**40))
    return {
        **token,
        "strategy": {"Fixed": rng.choice((0, 9, 2**40))},
        "pad_to_multiple_of": multiple,
    }


_PARTS = {
    "normalizer": _normalizer,
    "pre_tokenizer": _pre_tokenizer,
    "truncation": _truncation,
    "padding": _padding,
}


class Tokenizers:
    """Files with hostile parts or changed fields."""

    def __init__(self, root: pathlib.Path) -> None:
        self.path, self.bases = root / "tokenizer.json", bases.tokenizer_files()
        self.target = bases.model("llama")

    def case(self, rng: random.Random) -> Case:
        made = rng.choice(self.bases)
        if rng.random() < 0.55:
            part = rng.choice(sorted(_PARTS))
            made = {**made, part: _PARTS[part](rng)}
        if rng.random() < 0.5:
            made = values.changed(rng, made, rng.choice((1, 1, 2, 4)))
        self.path.write_bytes(values.text_of(rng, made))
        text, special, translates = rng.choice(_TEXTS), rng.random() < 0.5, rng.random() < 0.2

        def act() -> None:
            read = read_tokenizer(self.path)
            target = dataclasses.replace(self.target, tokenizer=read)
            ids = text_ids("the prompt", target, text, special)
            assert all(isinstance(i, int) for i in ids)
            size = 1 + max([*read.get_vocab().values(), 0])
            if translates and size < 10**5:
                specjax.translate(read, bases.tokenizer(), size, bases.VOCAB)

        return Case(act, (str(self.path), "the prompt", "tokenizer"))
