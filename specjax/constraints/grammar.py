"""Grammars: matchers of llguidance over a target's tokens.

Grammar -> llguidance's form -> one matcher, checked -> a copy of it for each row
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specjax._internal.bit_masks import words_of
from specjax._internal.checks import each, reworded
from specjax._internal.extras import need
from specjax._internal.jit_cache import Recent
from specjax.constraints.compile import called, need_end, tokenizer_of
from specjax.constraints.expressions import Grammar
from specjax.constraints.matching import Matcher
from specjax.models import LanguageModel
from specjax.text import token_bytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")

# Without this line llguidance would allow only one spelling of a text that is forced.  It stands
# behind the grammar, so that messages keep the grammar's own line numbers.
_ANY_SPELLING = '\n%llguidance {"no_forcing": true}\n'

_STUCK = "NoExtension"
_LONGEST = 200  # of a reason

_vocabularies: Recent[tuple[str, int], LLTokenizer] = Recent()
_grammars: Recent[tuple[str, str, int], LLMatcher] = Recent()


class GrammarMatcher(Matcher):
    """A matcher of llguidance.

    Args:
      start: an `llguidance.LLMatcher` of an empty text; it is not changed.
      size: V, of the target.
      called: the grammar, for messages.
    """

    def __init__(self, start: LLMatcher, size: int, called: str) -> None:
        self.called = called
        self.words, self.spare = words_of(size), -size % 32
        self._start, self._inner, self._text = start, start.deep_copy(), list[int]()

    def allowed(self, words: np.ndarray) -> None:
        # llguidance's vocabulary has one more token at its end: an EOS, which no row uses.
        words[:] = np.frombuffer(self._inner.compute_bitmask(), np.dtype("<u4"))[: self.words]
        words[-1] &= np.uint32(2**32 - 1) >> np.uint32(self.spare)

    def is_complete(self) -> bool:
        return self._inner.is_accepting()

    def push(self, token: int) -> bool:
        if self._inner.try_consume_tokens([token]) != 1:
            return False
        self._text.append(token)
        return True

    def pop(self) -> None:
        self._text.pop()
        if self._inner.is_error() or not self._inner.rollback(1):
            # llguidance stays in the error that a draft led to, but the text is free of it.
            self._inner = self._start.deep_copy()
            self._inner.consume_tokens(self._text)

    def fault(self) -> str | None:
        lines = self._inner.get_error().splitlines()
        # It calls a text without a way on an error, too.
        return None if not lines or _STUCK in lines[0] else lines[0][:_LONGEST]


def matchers_of(
    target: LanguageModel, constraint: object, ends: list[list[int]]
) -> tuple[list[Callable[[], Matcher] | None] | None, list[object]]:
    """Returns a function that makes each row's matcher, and the constraints that are not grammars.

    Args:
      target: the model whose tokens are constrained.
      constraint: one for all rows, or a list with one or None for each.
      ends: the tokens that end each row.

    Returns:
      A function for each row with a grammar and None for others, or None if there is no grammar;
      and each row's constraint, None for those with a grammar.

    Raises:
      ValueError: llguidance is missing or refuses a grammar, or the vocabulary cannot spell its
        texts.
    """
    asked = each("constraint", constraint, len(ends))
    rest: list[object] = [None if isinstance(one, Grammar) else one for one in asked]
    if not any(isinstance(one, Grammar) for one in asked):
        return None, rest
    begin: list[Callable[[], Matcher] | None] = []
    for one, eos in zip(asked, ends, strict=True):
        if isinstance(one, Grammar):
            need_end(target, one, eos)
            begin.append(
                functools.partial(
                    GrammarMatcher, _start(target, one), target.model.vocab_size, called(one)
                )
            )
        else:
            begin.append(None)
    return begin, rest


def _start(target: LanguageModel, grammar: Grammar) -> LLMatcher:
    """Returns llguidance's matcher of an empty text, checked."""
    name, size = f"constraint={called(grammar)}", target.model.vocab_size
    need("llguidance", name, "grammar")
    tokenizer, digest = tokenizer_of(target, grammar)
    vocabulary = _vocabularies.get(
        (digest, size), lambda: _vocabulary(token_bytes(tokenizer, size))
    )
    return _grammars.get(
        (grammar.key, digest, size), lambda: _compile(vocabulary, grammar, name, target)
    )


def _vocabulary(written: Sequence[bytes | None]) -> LLTokenizer:
    """Returns a tokenizer of llguidance with an extra end token, since rows have their own ends."""
    import llguidance

    class Tokens:
        eos_token_id, bos_token_id = len(written), None
        tokens = [*(text or b"" for text in written), b""]  # noqa: RUF012 - it is not changed
        special_token_ids = [  # noqa: RUF012
            *(token for token, text in enumerate(written) if not text), len(written)
        ]  # fmt: skip

        def __call__(self, text: object) -> list[int]:
            return []  # spellings are not asked for: any tokens may write a text

    wrapped = llguidance.TokenizerWrapper(Tokens())
    return llguidance.LLTokenizer(wrapped, n_vocab=len(written) + 1, eos_token=len(written))


def _compile(
    vocabulary: LLTokenizer, grammar: Grammar, name: str, target: LanguageModel
) -> LLMatcher:
    import llguidance

    form = _form(grammar, name)
    wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(form, vocabulary)
    if wrong:
        raise ValueError(f"{name} {_reason(messages[0])}")
    inner = llguidance.LLMatcher(vocabulary, form, log_level=0)
    first = GrammarMatcher(inner, target.model.vocab_size, name)
    words = np.zeros(first.words, np.uint32)
    first.allowed(words)
    if fault := first.fault():
        raise ValueError(f"{name} cannot be followed ({fault}): write a smaller one")
    if not words.any():
        why = "matches only the empty text" if first.is_complete() else (
            f"matches no text that the vocabulary of {target.name} can write"
        )  # fmt: skip
        raise ValueError(f"{name} {why}: correct it")
    return inner


def _form(grammar: Grammar, name: str) -> str:
    """Returns a grammar in the form that llguidance reads."""
    from llguidance import LLMatcher, gbnf_to_lark

    text = grammar.grammar
    assert isinstance(text, str)
    if grammar.is_schema:
        space = {"whitespace_pattern": grammar.whitespace} if grammar.whitespace else {}
        own = {"x-guidance": {"whitespace_flexible": bool(space), **space}}
        return LLMatcher.grammar_from_lark(
            f"start: %json {json.dumps({**json.loads(text), **own})}{_ANY_SPELLING}"
        )
    if "::=" in text:
        # It raises exceptions of many types for a faulty grammar.
        with reworded(f"{name} is not a grammar in GBNF (", "); correct it", (Exception,)):
            text = gbnf_to_lark.any_to_lark(text)
    return LLMatcher.grammar_from_lark(text + _ANY_SPELLING)


def _reason(message: str) -> str:
    """Returns the error of a grammar, with the line if llguidance names one."""
    place = _PLACE.match(message)
    first = message[place.end() if place else 0 :].splitlines()[0]
    at = f" at line {place[1]}, column {place[2]}" if place else ""
    return f"cannot be used{at}: {first}; correct it"
