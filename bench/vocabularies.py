"""`python -m bench.vocabularies`: how long it takes to translate between two vocabularies.

A draft with another tokenizer needs tables that translate its tokens to the target's.  Here both
tokenizers are made up, at the sizes of real ones: each leaves out a tenth of one stream of
byte-pair merges, so that they share most of their tokens.  The draft's is byte-level like the
target's, or of sentencepiece's kind.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import random
import statistics
import time
from collections.abc import Iterator
from typing import Protocol, cast

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from bench.command import run
from specjax import Translation, translate
from specjax.options import fields
from specjax.options.command import parse

_LONGEST = 12
_LEFT_OUT = 0.1
KINDS = ("byte-level", "sentencepiece")


@dataclasses.dataclass(frozen=True)
class VocabulariesOptions(fields.Options):
    """The options of `python -m bench.vocabularies`."""

    target_size: int = fields.option(128_000, "tokens of the target (default: 128000)")
    draft_size: int = fields.option(32_000, "tokens of the draft (default: 32000)")
    rounds: int = fields.option(3, "rounds, whose median is reported (default: 3)")


def main(argv: list[str] | None = None) -> None:
    arguments = parse(VocabulariesOptions, argv, __doc__, "python -m bench.vocabularies")
    if min(arguments.target_size, arguments.draft_size) < 512 or arguments.rounds < 1:
        raise ValueError("sizes must be at least 512, to hold all bytes, and --rounds at least 1")
    target = tokenizer(arguments.target_size, 1, "byte-level")
    print(
        f"target of {arguments.target_size} tokens, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}\n"
    )
    print(
        "| draft | tokens | shared | draft tokens a target token, at most | seconds |\n"
        "|---|---|---|---|---|"
    )
    for kind in KINDS:
        draft = tokenizer(arguments.draft_size, 2, kind)
        tables, seconds = measure(target, draft, arguments.rounds)
        pieces = tables.pieces.shape[1]
        print(
            f"| {kind} | {arguments.draft_size} | {tables.num_shared} | {pieces} | {seconds:.2f} |",
            flush=True,
        )


class _Pipeline(Protocol):
    """The attributes of a tokenizer that its stubs declare as read-only."""

    pre_tokenizer: object
    decoder: object


def measure(
    target: tokenizers.Tokenizer, draft: tokenizers.Tokenizer, rounds: int
) -> tuple[Translation, float]:
    """The tables, and the median seconds to make them."""
    samples, tables = [], None
    for _ in range(rounds):
        started = time.perf_counter()
        tables = translate(target, draft, target.get_vocab_size(), draft.get_vocab_size())
        samples.append(time.perf_counter() - started)
    assert tables is not None
    return tables, statistics.median(samples)


def tokenizer(size: int, seed: int, kind: str) -> tokenizers.Tokenizer:
    """A byte-pair encoding of `size` tokens; the seed decides which merges it lacks."""
    space, first = (
        ("Ġ", sorted(pre_tokenizers.ByteLevel.alphabet()))
        if kind == KINDS[0]
        else ("▁", _fallback())
    )
    vocabulary = {token: number for number, token in enumerate(first)}
    lacks, merges = random.Random(seed), []
    for left, right in _stream():
        if lacks.random() < _LEFT_OUT:
            continue
        left, right = left.replace(" ", space), right.replace(" ", space)
        if left in vocabulary and right in vocabulary and left + right not in vocabulary:
            merges.append((left, right))
            vocabulary[left + right] = len(vocabulary)
            if len(vocabulary) == size:
                break
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=kind != KINDS[0]))
    whole = cast(_Pipeline, made)
    if kind == KINDS[0]:
        whole.pre_tokenizer, whole.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
    else:
        whole.pre_tokenizer = pre_tokenizers.Metaspace()
        whole.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    return made


def _fallback() -> list[str]:
    return [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(0x21, 0x7F))]


def _stream() -> Iterator[tuple[str, str]]:
    """An endless stream of pairs of tokens to merge; a space only begins a token.

    It begins with letters, and later prefers tokens that were merged early.
    """
    rng = random.Random(0)
    tokens, known = [" ", *map(chr, range(0x21, 0x7F))], set()
    while True:
        left, right = (tokens[int(len(tokens) * rng.random() ** 2)] for _ in range(2))
        if " " in right or len(left) + len(right) > _LONGEST or left + right in known:
            continue
        known.add(left + right)
        tokens.append(left + right)
        yield left, right


if __name__ == "__main__":
    run(main)
