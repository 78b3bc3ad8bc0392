"""`python -m bench.vocabularies`: how long the tables take that let a draft of another tokenizer speak for a target.

The tokenizers are made up, at the sizes of real ones: byte-pair merges from one stream, of which each leaves out a
tenth, so that they share most of their tokens, as real ones do; the draft's is byte-level like the target's, or of
sentencepiece's kind.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from bench.command import run
from specjax import Translation, translate

_LONGEST = 12
_LEFT_OUT = 0.1
KINDS = ("byte-level", "sentencepiece")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.vocabularies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--target-size", type=int, default=128_000, help="tokens of the target (default: 128000)"
    )
    parser.add_argument(
        "--draft-size", type=int, default=32_000, help="and of the draft (default: 32000)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="of which the median counts (default: 3)"
    )
    arguments = parser.parse_args(argv)
    if min(arguments.target_size, arguments.draft_size) < 512 or arguments.rounds < 1:
        parser.error(
            "sizes must be at least 512, which is room for all bytes, and --rounds at least 1"
        )
    target = tokenizer(arguments.target_size, 1, "byte-level")
    print(
        f"target of {arguments.target_size} tokens, {os.cpu_count()} cores, Python {platform.python_version()}\n"
    )
    print(
        "| draft | tokens | shared | draft tokens a target token, at most | seconds |\n|---|---|---|---|---|"
    )
    for kind in KINDS:
        draft = tokenizer(arguments.draft_size, 2, kind)
        tables, seconds = measure(target, draft, arguments.rounds)
        pieces = tables.pieces.shape[1]
        print(
            f"| {kind} | {arguments.draft_size} | {tables.num_shared} | {pieces} | {seconds:.2f} |",
            flush=True,
        )


def measure(target: Any, draft: Any, rounds: int) -> tuple[Translation, float]:
    """The tables, and the median of the seconds that it took to make them."""
    samples, tables = [], None
    for _ in range(rounds):
        started = time.perf_counter()
        tables = translate(target, draft, target.get_vocab_size(), draft.get_vocab_size())
        samples.append(time.perf_counter() - started)
    assert tables is not None
    return tables, statistics.median(samples)


def tokenizer(size: int, seed: int, kind: str) -> tokenizers.Tokenizer:
    """A byte-pair encoding of so many tokens; the seed says which merges it lacks."""
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
    whole: Any = made  # its stubs know no attribute that can be set
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
    """Pairs of tokens to merge, without end: letters, then mostly what was merged early.  A space only leads."""
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
