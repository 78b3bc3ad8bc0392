"""What every argument of `generate` means, stated independently of the library.

`MEANINGS` serves `test_arguments.py`. A reader returns what a value means, or REFUSED.
"""

import math
import re

import folders
import jax
import numpy as np

import specjax

ROWS, VOCAB, CONTEXT, NEW = 2, 320, 512, 128
REFUSED = object()
LARGEST = float(np.finfo(np.float32).max)


def listed(value):
    """The entries of a list in any accepted type, or None for anything else."""
    if type(value) in (list, tuple, range):
        return list(value)
    return (
        list(np.asarray(value))
        if isinstance(value, np.ndarray | jax.Array) and value.ndim
        else None
    )


def real(value):
    """The value as a Python number, or REFUSED."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        name = value.dtype.name
        return (
            REFUSED
            if value.ndim or not re.match("u?int|float|bfloat", name)
            else real(value.item())
        )
    return value if type(value) in (int, float) else REFUSED


def setting(accept, whole=False, lists_of_one=True):
    """One number for all rows, or one per row."""

    def meaning(value):
        entries = listed(value)
        entries = (
            [value] * ROWS
            if entries is None
            else entries * ROWS
            if lists_of_one and len(entries) == 1
            else entries
        )
        numbers = [real(entry) for entry in entries]
        if len(numbers) != ROWS or any(
            n is REFUSED or (whole and type(n) is float) for n in numbers
        ):
            return REFUSED
        return numbers if all(abs(n) <= LARGEST and accept(n) for n in numbers) else REFUSED

    return meaning


def count(least, most):
    def meaning(value):
        amount = real(value)
        return amount if type(amount) is int and least <= amount <= most else REFUSED

    return meaning


def only(*allowed):
    return lambda value: value if any(value is one for one in allowed) else REFUSED


def or_none(meaning, default=None):
    return lambda value: default if value is None else meaning(value)


def ids(value, empty=True):
    entries = listed(value)
    entries = None if entries is None else [real(entry) for entry in entries]
    good = (
        entries is not None
        and all(type(n) is int and 0 <= n < VOCAB for n in entries)
        and (empty or entries)
    )
    return entries if good else REFUSED


def text(value):
    """A prompt's text, which must not have a lone surrogate, since that has no bytes."""
    if isinstance(value, str) and value and "\ud800" not in value:
        return folders.tokenizer().encode(value).ids
    return REFUSED


def prompts(value):
    entries = [value] if isinstance(value, str) else listed(value)
    if not entries:
        return REFUSED
    rows = [text(row) if isinstance(row, str) else ids(row, empty=False) for row in entries]
    return REFUSED if REFUSED in rows else rows


def eos(value):
    entries = listed(value)
    entries = [value] if entries is None else entries
    if entries and all(listed(row) is not None for row in entries):
        rows = [ids(row) for row in entries]
        return rows if len(rows) == ROWS and REFUSED not in rows else REFUSED
    return REFUSED if (one := ids(entries)) is REFUSED else [one] * ROWS


def stop(value):
    entries = [value] if isinstance(value, str) else listed(value)
    return (
        REFUSED
        if entries is None or not all(isinstance(t, str) and t for t in entries)
        else entries
    )


def bias(value):
    entries = listed(value)
    rows = [value] * ROWS if entries is None else entries
    if len(rows) != ROWS or not all(isinstance(row, dict) for row in rows):
        return REFUSED
    for row in rows:
        numbers = [real(added) for added in row.values()]
        if ids(list(row)) is REFUSED or any(n is REFUSED for n in numbers):
            return REFUSED
        if not all(n == -math.inf or abs(n) <= LARGEST for n in numbers):
            return REFUSED
    return rows


def bad_words(value):
    """The number of phrases; a text stands for two."""
    entries = listed(value)
    if entries is None:
        return REFUSED
    for word in entries:
        if isinstance(word, str):
            if not word.strip() or text(word) is REFUSED:
                return REFUSED
        elif ids(word, empty=False) in (REFUSED, [0]):  # 0 is EOS
            return REFUSED
    return entries


def documents(value):
    """As they are; one list of them, or one per prompt."""
    entries = listed(value)
    if entries is None:
        return value if value is None else REFUSED
    nested = [None if isinstance(entry, str) else listed(entry) for entry in entries]
    each = entries and all(
        found is not None and all(isinstance(x, str) or listed(x) is not None for x in found)
        for found in nested
    )
    if each and len(entries) != ROWS:
        return REFUSED
    lists = nested if each else [entries]
    return REFUSED if any(found and prompts(found) is REFUSED for found in lists) else value


def expected(value):
    """Token ids or None for each prompt."""
    entries = listed(value)
    if entries is None:
        return value if value is None else REFUSED
    if len(entries) != ROWS or any(isinstance(entry, str) for entry in entries):
        return REFUSED
    kept = [entry for entry in entries if entry is not None]
    return REFUSED if any(ids(entry) is REFUSED for entry in kept) else value


def messages(value):
    entries = listed(value)
    if not entries:
        return REFUSED
    chats = [entries] if isinstance(entries[0], dict) else entries
    for chat in chats:
        turns = listed(chat)
        if not turns or not all(isinstance(m, dict) and type(m.get("role")) is str for m in turns):
            return REFUSED
    return chats


def same_numbers(read):
    return lambda call, wanted: np.array_equal(read(call), np.array(wanted, read(call).dtype))


def penalty(name, off):
    """Penalties are None if they are off for all rows."""

    def holds(call, wanted):
        penalties = call.processors and call.processors.penalties
        given = np.full(ROWS, off) if penalties is None else getattr(penalties, name)
        return np.array_equal(given, np.array(wanted, np.float32))

    return holds


def biased(call, wanted):
    held = np.zeros((ROWS, VOCAB)) if call.processors is None else call.processors.bias
    given = np.zeros((ROWS, VOCAB), np.float32)
    for row, entries in zip(given, wanted, strict=True):
        for token, added in entries.items():
            row[token] = real(added)
    return np.array_equal(held, given)


def is_nones(value):
    entries = listed(value)
    return entries is not None and len(entries) == ROWS and all(e is None for e in entries)


def anything(call, wanted):
    return True


# For each argument: what a value means (or REFUSED), and whether the checked call holds it.
MEANINGS = {
    "target": (only(), anything),
    "prompts": (
        prompts,
        lambda c, w: [c.prompt[i, :n].tolist() for i, n in enumerate(c.lengths)] == w,
    ),
    "messages": (messages, lambda c, w: len(c.lengths) == len(w)),
    "draft": (only(None), lambda c, w: c.decoder.proposer.drafter is None),
    "draft_window": (only(None), anything),  # there is no draft
    "draft_dtype": (only(None), anything),
    "proposer": (only(None), lambda c, w: isinstance(c.decoder.proposer, specjax.Adaptive)),
    "adapter": (only(None), anything),
    "documents": (documents, lambda c, w: (c.documents is None) == (w is None)),
    "expected": (expected, lambda c, w: (c.documents is None) == (w is None)),
    "drafter": (only(None), anything),
    "speculative_config": (only(None), anything),
    "chat_template_kwargs": (only(None), anything),
    "rule": (
        lambda v: v if v is None or (type(v) is str and v == "match") else REFUSED,
        lambda c, w: c.decoder.rule == specjax.Match(),
    ),
    "synthetic_acceptance": (only(None), anything),  # the table has no drafts to accept
    "num_drafts": (
        or_none(setting(lambda n: 0 <= n <= CONTEXT, whole=True, lists_of_one=False)),
        lambda c, w: c.num_drafts is None if w is None else c.num_drafts.tolist() == w,
    ),
    "max_new_tokens": (count(1, CONTEXT - 3), lambda c, w: c.new == w),
    "temperature": (
        or_none(setting(lambda n: n >= 0), [0] * ROWS),
        same_numbers(lambda c: c.sampling.temperature),
    ),
    "top_k": (
        or_none(setting(lambda n: 0 <= n < 2**31, whole=True), [0] * ROWS),
        same_numbers(lambda c: c.sampling.top_k),
    ),
    "top_p": (
        or_none(setting(lambda n: 0 < n <= 1), [1] * ROWS),
        same_numbers(lambda c: c.sampling.top_p),
    ),
    "min_p": (
        or_none(setting(lambda n: 0 <= n <= 1), [0] * ROWS),
        same_numbers(lambda c: c.sampling.min_p),
    ),
    "repetition_penalty": (or_none(setting(lambda n: n > 0), [1] * ROWS), penalty("repetition", 1)),
    "presence_penalty": (setting(lambda n: True), penalty("presence", 0)),
    "frequency_penalty": (setting(lambda n: True), penalty("frequency", 0)),
    "logit_bias": (or_none(bias, [{}] * ROWS), biased),
    "bad_words": (bad_words, lambda c, w: (c.processors is not None) == bool(w)),
    "logits_processor": (only(None), lambda c, w: c.decoder.logits_processor is None),
    "min_new_tokens": (
        setting(lambda n: 0 <= n <= NEW, whole=True),
        lambda c, w: (c.processors.min_length.tolist() if c.processors else [0] * ROWS) == w,
    ),
    "constraint": (
        lambda v: v if v is None or is_nones(v) else REFUSED,
        lambda c, w: c.processors is None,
    ),
    "eos": (
        or_none(eos, [[0]] * ROWS),
        lambda c, w: (
            [sorted(set(row[row >= 0].tolist())) for row in c.eos]
            == [sorted(set(row)) for row in w]
        ),
    ),
    "seed": (
        setting(lambda n: 0 <= n < 2**32, whole=True, lists_of_one=False),
        lambda c, w: c.seeds[0].tolist() == w,
    ),
    "stop": (or_none(stop, []), lambda c, w: list(c.texts.stops) == w),
    "logprobs": (or_none(count(0, VOCAB)), lambda c, w: c.decoder.num_logprobs == w),
    "stream": (
        lambda v: bool(v) if type(v) in (bool, np.bool_) else REFUSED,
        lambda c, w: c.stream is w,
    ),
    "mesh": (only(None), lambda c, w: c.mesh is None),
    "draft_mesh": (only(None), lambda c, w: c.overlapped is None),
}
