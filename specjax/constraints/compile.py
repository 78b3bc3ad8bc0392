"""Compiles a user's constraints to automata over a target's tokens, kept in memory and on disk."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import weakref
import zipfile
import zlib

import numpy as np
import tokenizers

from specjax._internal.checks import each, shown
from specjax._internal.jit_cache import Recent
from specjax._internal.paths import cache_folder
from specjax.constraints.automaton import Automaton
from specjax.constraints.expressions import Choice, Expression, Grammar, JSONSchema, Regex
from specjax.constraints.lift import canonical, lift, reachable, spelt
from specjax.models import LanguageModel
from specjax.text import no_panic, token_bytes, vocabulary_digest

_FORM = 2  # of the files, and of what expressions and schemas mean
_DAMAGE = (zipfile.BadZipFile, zlib.error, AttributeError)
_ARRAYS = ("classes", "next", "accepting", "likely")

_recent: Recent[tuple[str, str, int], Automaton] = Recent()
# By target, since a tokenizer of tokenizers 0.21 cannot be referred to weakly.
_digests: weakref.WeakKeyDictionary[LanguageModel, str] = weakref.WeakKeyDictionary()

Constraint = Expression | Grammar | Automaton
"""A constraint of `generate(constraint=...)`: an `Expression`, a `Grammar` or an `Automaton`."""


def constraints_of(
    target: LanguageModel, constraint: object, ends: list[list[int]], new: int
) -> list[Automaton | None]:
    """Returns the automaton of each row, or None.

    Args:
      target: the model whose tokens are constrained.
      constraint: one for all rows, or a list with one or None for each.
      ends: the tokens that end each row.
      new: the most new tokens of a row.

    Raises:
      ValueError: it is not a constraint, cannot be compiled, or has no text of at most `new`
        tokens.
    """
    asked = each("constraint", constraint, len(ends))
    made = [None if one is None else automaton_of(target, one) for one in asked]
    fitted: list[Automaton | None] = []
    for one, automaton, eos in zip(asked, made, ends, strict=True):
        if automaton is None:
            fitted.append(None)
            continue
        need_end(target, one, eos)
        automaton = _without(automaton, tuple(eos))
        least = int(automaton.shortest[automaton.start])
        if least > new:
            raise ValueError(
                f"max_new_tokens={new} is too small: the shortest text of {called(one)} has "
                f"{least} tokens; pass at least {least}"
            )
        fitted.append(automaton)
    return fitted


@functools.lru_cache(maxsize=64)
def _without(automaton: Automaton, eos: tuple[int, ...]) -> Automaton:
    return automaton.without(eos)


def automaton_of(target: LanguageModel, constraint: object) -> Automaton:
    """Returns the automaton of a constraint over the tokens of a target.

    Raises:
      ValueError: it is not a constraint, it allows no text or only the empty one, the vocabulary
        cannot spell its texts, or it is larger than the bounds.
    """
    size = target.model.vocab_size
    if isinstance(constraint, Automaton):
        if constraint.vocab_size != size:
            raise ValueError(
                f"constraint is an automaton over {constraint.vocab_size} tokens, and "
                f"{target.name} has {size}"
            )
        return constraint
    if isinstance(constraint, Grammar):
        raise ValueError(
            f"constraint={called(constraint)} is followed on the host, which an engine and a "
            "decoder of your own do not ask: pass a specjax.Regex or a specjax.JSONSchema here, or "
            "the grammar to specjax.generate"
        )
    if not isinstance(constraint, Regex | JSONSchema | Choice):
        raise ValueError(
            f"constraint={shown(constraint)} is not a constraint; pass specjax.Regex('...'), "
            "specjax.JSONSchema({...}), specjax.Choice(['...']), specjax.Grammar('...'), a "
            "specjax.Automaton, or a list of them with one per prompt"
        )
    tokenizer, digest = tokenizer_of(target, constraint)

    key = json.dumps([constraint.key, constraint.canonical])

    def make() -> Automaton:
        path = _path(key, digest, size)
        found = _read(path)
        if found is None:
            found = _compile(target, tokenizer, constraint)
            _write(path, found)
        return found

    return _recent.get((key, digest, size), make)


def tokenizer_of(target: LanguageModel, constraint: object) -> tuple[tokenizers.Tokenizer, str]:
    """Returns the tokenizer of a target, and the digest of its vocabulary.

    Raises:
      ValueError: it has none, and `constraint` needs one.
    """
    if target.tokenizer is None:
        raise ValueError(
            f"constraint={called(constraint)} needs a tokenizer, and {target.name} has none: pass "
            "a specjax.Automaton over its tokens"
        )
    digest = _digests.get(target)
    if digest is None:
        digest = _digests[target] = vocabulary_digest(target.tokenizer)
    return target.tokenizer, digest


def need_end(target: LanguageModel, constraint: object, ends: list[int]) -> None:
    """Raises ValueError if no token can end a text."""
    if not ends:
        raise ValueError(
            f"constraint={called(constraint)} needs a token that ends the text, and {target.name} "
            "has none here: pass eos="
        )


def _compile(
    target: LanguageModel, tokenizer: tokenizers.Tokenizer, constraint: Expression
) -> Automaton:
    name, automaton = called(constraint), constraint.compile()
    example = automaton.example()
    if example is None:
        raise ValueError(f"constraint={name} matches no text: correct it")
    if not (automaton.next[0] >= 0).any():
        raise ValueError(f"constraint={name} matches only the empty text: correct it")
    written = token_bytes(tokenizer, target.model.vocab_size)
    classes, table = lift(automaton, written)

    def encode(text: bytes) -> list[int]:
        try:
            with no_panic(f"constraint={name}"):
                return tokenizer.encode(text.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:  # a part of a character
            return []

    likely = spelt(automaton, written, encode)
    if constraint.canonical:
        classes, table = canonical(classes, table, likely)
    try:
        return reachable(Automaton(classes, table, automaton.accepting, 0, likely))
    except ValueError:
        known = set(b"".join(text for text in written if text))
        lacking = bytes(byte for byte in example if byte not in known)
        named = f" (no token writes {lacking!r})" if lacking else ""
        raise ValueError(
            f"the vocabulary of {target.name} cannot write any text of constraint={name}{named}, "
            f"such as {shown(example.decode(errors='replace'))}"
        ) from None


def called(constraint: object) -> str:
    """Returns a constraint as text, for messages."""
    if isinstance(constraint, Regex):
        return f"Regex({shown(constraint.expression)})"
    if isinstance(constraint, Choice):
        return f"Choice({shown(list(constraint.texts))})"
    if isinstance(constraint, JSONSchema):
        return f"JSONSchema({shown(constraint.schema)})"
    if isinstance(constraint, Grammar):
        return f"Grammar({shown(constraint.grammar)})"
    return shown(constraint)


def _path(key: str, digest: str, size: int) -> pathlib.Path:
    name = hashlib.sha256(json.dumps([_FORM, key, digest, size]).encode()).hexdigest()[:32]
    return cache_folder("constraints") / f"{name}.npz"


def _read(path: pathlib.Path) -> Automaton | None:
    """Returns the automaton of a file, or None if it is missing or damaged."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            classes, table, accepting, likely = (file[name] for name in _ARRAYS)
            return Automaton(classes, table, accepting, int(file["start"]), likely)
    except (*_DAMAGE, OSError, ValueError, KeyError, EOFError, TypeError, IndexError):
        return None


def _write(path: pathlib.Path, automaton: Automaton) -> None:
    """Stores an automaton; a folder that cannot be written is not an error."""
    partial = path.with_suffix(f".{os.getpid()}.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            fields = {
                "classes": automaton.classes, "next": automaton.next,
                "accepting": automaton.accepting, "likely": automaton.likely,
            }  # fmt: skip
            np.savez_compressed(file, start=automaton.start, **fields)  # type: ignore[arg-type]
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)


def check_least(automata: list[Automaton | None], least: object) -> None:
    """Raises ValueError where `min_new_tokens` is more than a constraint's longest text has."""
    if not isinstance(least, np.ndarray):
        return
    for row, (automaton, asked) in enumerate(zip(automata, least.tolist(), strict=True)):
        most = asked if automaton is None else int(automaton.longest[automaton.start])
        if asked > most:
            raise ValueError(
                f"min_new_tokens={asked} is more than the {most} tokens of the longest text of the "
                f"constraint of prompt {row}"
            )
