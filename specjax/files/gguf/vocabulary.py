"""The tokenizer in a GGUF file, as the files that a folder has of one.

llama.cpp names two kinds of tokenizers, `tokenizer.ggml.model`, and for byte-level BPE the way in
which a text is cut before its bytes are merged, `tokenizer.ggml.pre`:

    gpt2     byte-level BPE with merges, of Llama 3 and Qwen
    llama    SentencePiece with a score for each token, of Llama 2 and Mistral

All tokens stand in the vocabulary by their ids.  Control tokens (such as <|im_start|>) and those
that a user defined are added tokens, too, so that a text cannot cut them into pieces.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from specjax._internal.checks import shown
from specjax._internal.fields import is_whole
from specjax.files.gguf.header import Header

_CURE = "put the tokenizer.json of the model's safetensors folder beside the file"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # of tokenizer.ggml.token_type
_LONGEST = 256  # characters of a SentencePiece token; every cut of it is tried

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*|\p{{N}}{_SIGNS}"


@dataclasses.dataclass(frozen=True)
class _Cut:
    """The cutting of a text before byte-level BPE.

    Attributes:
      expression: of the pieces; None: that of GPT-2.
      digits: each digit is a piece of its own.
      whole: a piece that is a token is not merged, and a text begins with BOS unless the file says
        otherwise.
      composed: the text is brought to Unicode's form NFC first.
    """

    expression: str | None
    digits: bool = False
    whole: bool = False
    composed: bool = False


_CUTS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), _Cut(_LLAMA_3, whole=True)),
    "qwen2": _Cut(_QWEN_2, composed=True),
    "deepseek-r1-qwen": _Cut(_QWEN_2),
    "tekken": _Cut(_TEKKEN, whole=True),
    "gpt-2": _Cut(None),
    "smollm": _Cut(None, digits=True),
}  # fmt: skip
"""The values of `tokenizer.ggml.pre` that are read."""


def tokenizer_files(file: pathlib.Path, header: Header) -> dict[str, bytes]:
    """Returns the `tokenizer.json` and `tokenizer_config.json` of a GGUF file; {}: it has none.

    Raises:
      ValueError: the tokenizer is of another kind, or its fields do not fit together.
    """
    prefix = "tokenizer.ggml."
    own = {
        name.removeprefix(prefix): value
        for name, value in header.fields.items()
        if name.startswith(prefix)
    }
    kind = own.get("model", "no_vocab")
    if kind in ("no_vocab", "none"):
        return {}
    if kind not in _MAKERS:
        raise ValueError(
            f"{file} has a tokenizer of the kind {shown(kind)} (tokenizer.ggml.model); of GGUF "
            f"files specjax reads {', '.join(_MAKERS)}: {_CURE}"
        )
    tokens = _list(file, own, "tokens", str)
    kinds = _list(file, own, "token_type", int, len(tokens)) if "token_type" in own else []
    made, begins = _MAKERS[kind](file, own, tokens)
    names = {
        name: _token(file, own, name, tokens)
        for name in ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")
    }
    first = names["bos_token_id"] if own.get("add_bos_token", begins) else None
    last = names["eos_token_id"] if own.get("add_eos_token", False) else None
    made |= {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, kinds, kind == "llama"),
        "post_processor": _between(first, last),
    }
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        found = names[f"{field}_token_id"]
        if found is not None:
            config[f"{name}_token"] = found[1]
    template = header.fields.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return {
        "tokenizer.json": json.dumps(made, ensure_ascii=False).encode(errors="replace"),
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }


def _byte_level(
    file: pathlib.Path, own: Mapping[str, Any], tokens: list[str]
) -> tuple[dict[str, Any], bool]:
    """Returns the model of byte-level BPE, and whether a text begins with BOS by default."""
    name = own.get("pre", "default")
    cut = _CUTS.get(name) if isinstance(name, str) else None
    if cut is None:
        raise ValueError(
            f"{file} has a tokenizer whose texts are cut in the way {shown(name)} "
            f"(tokenizer.ggml.pre); of GGUF files specjax reads {', '.join(_CUTS)}: {_CURE}"
        )
    pairs = [merge.split(" ") for merge in _list(file, own, "merges", str)]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        raise ValueError(
            f"{file}: tokenizer.ggml.merges holds {shown(' '.join(wrong))}, which is not a pair of "
            f"tokens: {_CURE}"
        )
    steps: list[dict[str, Any]] = []
    if cut.digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if cut.expression is not None:
        pattern = {"Regex": cut.expression}
        steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    steps.append({**_BYTES, "use_regex": cut.expression is None})
    made = {
        "normalizer": {"type": "NFC"} if cut.composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**_BYTES, "use_regex": True},
        "model": _bpe(tokens, pairs, ignore_merges=cut.whole),
    }
    return made, cut.whole


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _sentencepiece(
    file: pathlib.Path, own: Mapping[str, Any], tokens: list[str]
) -> tuple[dict[str, Any], bool]:
    """Returns BPE whose merges have the order of the scores, and that texts begin with BOS."""
    scores = _list(file, own, "scores", (float, int), len(tokens))
    longest = max(tokens, key=len)
    if len(longest) > _LONGEST:
        raise ValueError(
            f"{file} has a token of {len(longest)} characters, and at most {_LONGEST} are read: "
            f"{_CURE}"
        )
    unknown = _token(file, own, "unknown_token_id", tokens)
    spaced = bool(own.get("add_space_prefix", True))
    space = {"type": "Metaspace", "replacement": "▁", "split": False}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if spaced:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    made = {
        "normalizer": None,
        "pre_tokenizer": {**space, "prepend_scheme": "first" if spaced else "never"},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            tokens,
            _merges(tokens, scores),
            unk_token=None if unknown is None else unknown[1],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }
    return made, True


_MAKERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> list[list[str]]:
    """Returns the pairs of tokens that make a token, the pairs of the best token first."""
    ids = {token: number for number, token in enumerate(tokens)}
    found: list[tuple[float, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in ids and pair[1] in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(score, *pair) for pair in pairs]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [[left, right] for _, left, right in found]


def _bpe(tokens: Sequence[str], merges: list[list[str]], **settings: Any) -> dict[str, Any]:
    by_default = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": False,
    }  # fmt: skip
    ids = {token: number for number, token in enumerate(tokens)}
    return {**by_default, **settings, "vocab": ids, "merges": merges}


def _added(tokens: Sequence[str], kinds: Sequence[int], unknown: bool) -> list[dict[str, Any]]:
    """Returns the added tokens; `unknown`: the token for unknown text is one of them."""
    special = {_CONTROL, _UNKNOWN} if unknown else {_CONTROL}
    switches = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": number, "content": token, **switches, "special": kind in special}
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if token and kind in {*special, _USER_DEFINED}
    ]


def _between(first: tuple[int, str] | None, last: tuple[int, str] | None) -> dict[str, Any] | None:
    """Returns the post-processor that writes a token before a text, or one behind it."""
    if first is None and last is None:
        return None
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    ends = [
        None if end is None else {"SpecialToken": {"id": end[1], "type_id": 0}}
        for end in (first, last)
    ]
    rows = [[ends[0], text, ends[1]] for text in texts]
    single, pair = ([part for part in row if part] for row in (rows[0], rows[0] + rows[1]))
    special = {
        end[1]: {"id": end[1], "ids": [end[0]], "tokens": [end[1]]}
        for end in (first, last)
        if end is not None
    }
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _list(
    file: pathlib.Path,
    own: Mapping[str, Any],
    name: str,
    kind: type | tuple[type, ...],
    length: int | None = None,
) -> list[Any]:
    """Returns a field that is a list of values of one kind, `length` of them."""
    values = own.get(name)
    if not isinstance(values, list) or not values or not all(isinstance(v, kind) for v in values):
        raise ValueError(
            f"{file}: tokenizer.ggml.{name} is {shown(values)}; its tokenizer needs a list there: "
            f"{_CURE}"
        )
    if length is not None and len(values) != length:
        raise ValueError(
            f"{file}: tokenizer.ggml.{name} has {len(values)} values for {length} tokens: {_CURE}"
        )
    return values


def _token(
    file: pathlib.Path, own: Mapping[str, Any], name: str, tokens: Sequence[str]
) -> tuple[int, str] | None:
    """Returns the token that a field names, with its id; None: the field is not there."""
    number: int | None = own.get(name)
    if number is None:
        return None
    if not is_whole(number) or not 0 <= number < len(tokens):
        raise ValueError(
            f"{file}: tokenizer.ggml.{name} is {shown(number)}, and there are {len(tokens)} "
            f"tokens: {_CURE}"
        )
    return number, tokens[number]
