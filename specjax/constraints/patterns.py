r"""Translates patterns of JSON Schema, in the syntax of ECMA-262, to Rust's `regex`.

A pattern matches characters, and JSON text has escapes for some of them.  So a character of a
pattern becomes the expression of its JSON between the quotes: itself, or `\"`, `\\`, `\b`, `\f`,
`\n`, `\r`, `\t`.  Other control characters are not written.

    ^a.$    ->    a(?:[[^\n\r\u2028\u2029]&&[^"\\\x00-\x1f]]|\\["\\bft])
"""

from __future__ import annotations

import dataclasses
import re
from typing import NoReturn

from specjax.constraints.json_texts import encoded, literal

Range = tuple[int, int]

_ESCAPED = '"\\\b\f\n\r\t'
_DIGITS: list[Range] = [(0x30, 0x39)]
_WORD: list[Range] = [*_DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE: list[Range] = [
    (0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
]  # fmt: skip
_LINE_ENDS: list[Range] = [(0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029)]
_KINDS = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_PLAIN = r'[^"\\\x00-\x1f]'
_LAST = 0x10FFFF
_DEPTH = 64  # of groups

_QUANTIFIER = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\}|\{,[0-9]+\})\??")
_GROUP = re.compile(r"\((?:\?(?::|i:|P?<[A-Za-z_$][\w$]*>))?")
_LOOKS = {"(?=": "look-ahead", "(?!": "look-ahead", "(?<=": "look-behind", "(?<!": "look-behind"}


@dataclasses.dataclass(frozen=True)
class _Class:
    """Characters: ranges, or a property of Unicode whose members are unknown here."""

    ranges: list[Range]
    negated: bool = False
    named: str | None = None

    @property
    def single(self) -> int | None:
        """The code of its only character, or None if it may have others."""
        if self.named is not None or self.negated or len(self.ranges) != 1:
            return None
        low, high = self.ranges[0]
        return low if low == high else None

    @property
    def expression(self) -> str:
        if self.named is not None:
            return self.named
        parts = [f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in map(_clipped, self.ranges)
                 if low <= high]  # fmt: skip
        if not parts:  # Rust has no class without characters
            return (
                f"[\\x{{0}}-\\x{{{_LAST:x}}}]" if self.negated else f"[^\\x{{0}}-\\x{{{_LAST:x}}}]"
            )
        return f"[{'^' * self.negated}{''.join(parts)}]"

    def has(self, character: str) -> bool | None:
        """Returns whether it has a character, or None if that is unknown."""
        if self.named is not None:
            return None
        return any(low <= ord(character) <= high for low, high in self.ranges) != self.negated


@dataclasses.dataclass
class _Group:
    """Alternatives, each a list of expressions, assertions ("^", "$") and groups."""

    opening: str
    parts: list[list[_Group | str]]
    quantifier: str = ""


def expression(pattern: str) -> str:
    r"""Returns the expression of the JSON contents of strings that a pattern matches as a whole.

    `^` and `$` may stand where a string begins and ends.  `\d`, `\w`, `\s` and `.` are those of
    ECMA-262, so `\w` is one of [A-Za-z0-9_].

    Example:
      >>> from specjax.constraints.patterns import expression
      >>> expression("^[a-c]+$")
      '(?:(?:[[\\x{61}-\\x{63}]&&[^"\\\\\\x00-\\x1f]])+)'

    Raises:
      ValueError: it is not such an expression, or has an element that no automaton can represent.
    """
    opening = "(?i:" if pattern.startswith("(?i)") else "(?:"
    reader = _Reader(pattern, 4 if opening == "(?i:" else 0)
    return _written(_Group(opening, reader.alternatives(0)), True, True)


def _written(group: _Group, first: bool, last: bool) -> str:
    """Returns a group as an expression.

    Args:
      first: nothing stands before it, so `^` holds there.
      last: nothing follows it, so `$` holds there.
    """
    choices = []
    for sequence in group.parts:
        text = ""
        for at, part in enumerate(sequence):
            begins = first and all(one == "^" for one in sequence[:at])
            ends = last and all(one == "$" for one in sequence[at + 1 :])
            if isinstance(part, _Group):
                once = part.quantifier in ("", "?", "??")
                text += _written(part, begins and once, ends and once)
            elif part in ("^", "$"):
                if not (begins if part == "^" else ends):
                    place = "begin" if part == "^" else "end"
                    _refuse(f"{part!r} where a string does not {place}")
            else:
                text += part
        choices.append(text)
    return f"{group.opening}{'|'.join(choices)}){group.quantifier}"


class _Reader:
    """Reads a pattern from left to right."""

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at

    def alternatives(self, depth: int) -> list[list[_Group | str]]:
        """Reads up to the end of the group at a depth, or of the pattern at depth 0."""
        if depth > _DEPTH:
            _refuse(f"more than {_DEPTH} groups inside of each other")
        found: list[list[_Group | str]] = [[]]
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == ")":
                if not depth:
                    _refuse("a ')' without a '('")
                self.at += 1
                return found
            if letter == "|":
                self.at += 1
                found.append([])
            elif letter in "^$":
                self.at += 1
                if self._quantifier():
                    raise ValueError(f"repeats {letter!r}")
                found[-1].append(letter)
            elif letter == "(":
                opening = self._opening()
                group = _Group(opening, self.alternatives(depth + 1))
                group.quantifier = self._quantifier()
                found[-1].append(group)
            else:
                found[-1].append(self._one() + self._quantifier())
        if depth:
            _refuse("a '(' without a ')'")
        return found

    def _opening(self) -> str:
        for begin, name in _LOOKS.items():
            if self.text.startswith(begin, self.at):
                _refuse(f"a {name} ({begin!r}), which no automaton keeps")
        begun = _GROUP.match(self.text, self.at)
        assert begun is not None
        self.at = begun.end()
        if self.text.startswith("?", self.at):
            _refuse(f"a group {self.text[self.at - 1 : self.at + 3]!r}")
        return "(?i:" if begun[0] == "(?i:" else "(?:"

    def _quantifier(self) -> str:
        found = _QUANTIFIER.match(self.text, self.at)
        if found is None:
            return ""
        self.at = found.end()
        return found[0].replace("{,", "{0,")

    def _one(self) -> str:
        """Reads one character of the string."""
        if (stray := _QUANTIFIER.match(self.text, self.at)) is not None:
            _refuse(f"{stray[0]!r} with nothing before it to repeat")
        letter = self.text[self.at]
        self.at += 1
        if letter == ".":
            return _character([_Class(_LINE_ENDS, True)])
        if letter == "[":
            return self._class()
        return _character([self._escape(False) if letter == "\\" else _single(ord(letter))])

    def _class(self) -> str:
        negated = self.text.startswith("^", self.at)
        self.at += negated
        found: list[_Class] = []
        while (one := self._member()) is not None:
            # A range, unless "-" is the last one, as in [a-], or next to a class, as in [\w-z].
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                end = self._member()
                assert end is not None
                low, high = one.single, end.single
                if low is None or high is None:
                    found += [one, _single(ord("-")), end]
                elif low > high:
                    _refuse(f"a range from {chr(low)!r} down to {chr(high)!r}")
                else:
                    found.append(_Class([(low, high)]))
            else:
                found.append(one)
        return _character(found, negated)

    def _member(self) -> _Class | None:
        """Reads the next member of a class, or None at its end."""
        if self.at >= len(self.text):
            _refuse("a '[' without a ']'")
        letter = self.text[self.at]
        self.at += 1
        if letter == "]":
            return None
        return self._escape(True) if letter == "\\" else _single(ord(letter))

    def _escape(self, inside: bool) -> _Class:
        """Reads the characters after a backslash, `inside` of a class or not."""
        letter = self.text[self.at : self.at + 1]
        self.at += 1
        if letter.lower() in _KINDS and letter:
            return _Class(_KINDS[letter.lower()], letter.isupper())
        if letter in _CONTROLS and letter:
            return _single(_CONTROLS[letter])
        if letter in ("p", "P"):
            name = self._take(r"\{[A-Za-z_0-9=]+\}", f"\\{letter}")
            return _Class([], named=f"\\{letter}{name}")
        if letter == "b" and inside:
            return _single(8)
        if letter == "c":
            return _single(ord(self._take("[A-Za-z]", "\\c")) % 32)
        if letter == "x":
            return _single(int(self._take("[0-9a-fA-F]{2}", "\\x"), 16))
        if letter == "u":
            return _single(self._code())
        if letter == "0" and not self.text[self.at : self.at + 1].isdigit():
            return _single(0)
        if letter in ("b", "B"):
            _refuse(f"\\{letter}, which no automaton keeps")
        if letter.isdigit() or letter == "k":
            _refuse(f"a back-reference (\\{letter}), which no automaton keeps")
        if not letter or (letter.isascii() and letter.isalpha()):
            _refuse(f"\\{letter}, which is no escape of ECMA-262")
        return _single(ord(letter))

    def _code(self) -> int:
        r"""Reads the number of \uXXXX, of a pair of them, or of \u{X}."""
        four = "[0-9a-fA-F]{4}"
        found = self._take(rf"{four}|\{{[0-9a-fA-F]{{1,6}}\}}", "\\u")
        code = int(found.strip("{}"), 16)
        if code > _LAST:
            _refuse(f"\\u{found}, which is no character")
        low = re.compile(rf"\\u({four})").match(self.text, self.at)
        if 0xD800 <= code < 0xDC00 and low and 0xDC00 <= (half := int(low[1], 16)) < 0xE000:
            self.at = low.end()
            return 0x10000 + ((code - 0xD800) << 10) + half - 0xDC00
        return code

    def _take(self, wanted: str, after: str) -> str:
        found = re.compile(wanted).match(self.text, self.at)
        if found is None:
            _refuse(f"{after} without {wanted}")
        self.at = found.end()
        return found[0]


def _single(code: int) -> _Class:
    return _Class([(code, code)])


def _clipped(one: Range) -> Range:
    """Returns a range of characters whose ends are not surrogates."""
    low, high = one
    return (0xE000 if 0xD800 <= low < 0xE000 else low), (
        0xD7FF if 0xD800 <= high < 0xE000 else high
    )


def _character(members: list[_Class], negated: bool = False) -> str:
    """Returns the expression of one character of these classes, or of none of them."""
    alone = members[0].single if len(members) == 1 and not negated else None
    if alone is not None and alone >= 0x20 and chr(alone) not in _ESCAPED:
        return members[0].expression
    every = "".join(one.expression for one in members) or _Class([]).expression
    choices = [f"[[{'^' * negated}{every}]&&{_PLAIN}]"]
    for character in _ESCAPED:
        known = [one.has(character) for one in members]
        if all(one is False for one in known) if negated else any(known):
            choices.append(literal(encoded(character)[1:-1]))
    return f"(?:{'|'.join(choices)})"


def _refuse(element: str) -> NoReturn:
    raise ValueError(f"has {element}")
