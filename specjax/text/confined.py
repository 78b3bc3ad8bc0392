"""The program of a confined process: it runs jobs that may kill or stall their process.

`sandbox.py` starts it as `python -I -S confined.py JOB SYS_PATH`.  It imports the modules of the
job, gives up files and most of the memory, and then answers requests.  A request is a line
{"seconds": s, "length": n} and n bytes; an answer is a line of JSON.

It imports nothing of specjax, which would bring JAX.
"""

from __future__ import annotations

import array
import base64
import contextlib
import datetime
import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from jinja2.nodes import Node
    from jinja2.parser import Parser

_Answer = dict[str, object]
_Job = Callable[[bytes], _Answer]

MEMORY = 2**30
"""The bytes of address space of a job, in addition to `PER_BYTE` for each byte of its request."""

PER_BYTE = 64
"""The bytes of memory for each byte of a request.  A tokenizer needs about 30 for a byte of its
file, and the parsed file as much again.
"""

LONGEST = 2**24
"""The most characters of a rendered template; a text of a million tokens has about 5 million."""

END = chr(0x10FFFF)
"""The character that ends the texts of an expression; no text contains it."""

STATES = 2**15 - 1
"""The most states of an expression's automaton; the table has 16 bits for each."""

_SHOWN = 400  # characters of a message
_GROWTH = 1000  # times that normalizers and decoders may lengthen a text


def templates() -> _Job:
    """Renders {"source": template, "variables": {...}} in Jinja's immutable sandbox."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Renders {% generation %}, which marks text for training, as its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson  # Jinja's own filter escapes HTML
    environment.globals |= {"raise_exception": refuse, "strftime_now": now}
    compiled = functools.lru_cache(maxsize=16)(environment.from_string)
    # What Python loads at its first use, before files are given up.
    compiled("{{ strftime_now('%Y') }}{{ lipsum(1) }}").render()

    def answer(request: bytes) -> _Answer:
        fields = json.loads(request)
        try:
            template = compiled(fields["source"])
        except MemoryError:
            raise
        except Exception as error:  # Jinja passes on whatever Python's compiler raises
            return {"damaged": _text(error)}
        try:
            text = template.render(fields["variables"])
        except MemoryError:
            raise
        except Exception as error:  # a template is a program, so it may raise any error
            return {"refused": _text(error)}
        if len(text) > LONGEST:
            return {"long": len(text)}
        return {"text": text}

    return answer


def tokenizers() -> _Job:
    """Builds the tokenizer of a file and uses it, which shows whether the library survives it."""
    import tokenizers

    probe = "".join(map(chr, range(32, 127))) + "\n\téß中文😀\u0301\u00a0 " + "aA1 .\n" * 8

    def answer(request: bytes) -> _Answer:
        text = request.decode()
        fields = json.loads(text)
        if not isinstance(fields, dict):
            return {"refused": f"it holds a {type(fields).__name__}, not an object"}
        growth = _growth(fields.get("normalizer")) * _growth(fields.get("decoder"))
        if growth > _GROWTH:
            return {"refused": f"its replacements make a text up to {growth:.3g} times as long"}
        made = tokenizers.Tokenizer.from_str(text)
        made.no_truncation()
        made.no_padding()
        for special in (False, True):
            made.decode(made.encode(probe, add_special_tokens=special).ids)
        made.encode("", add_special_tokens=True)
        return {}

    def guarded(request: bytes) -> _Answer:
        try:
            return answer(request)
        except MemoryError:
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            return {"refused": _text(error)}

    return guarded


def expressions() -> _Job:
    """Compiles {"expression": ..., "absent": ...} into states of bytes.

    outlines_core searches for an expression anywhere in a text, though only matches from its first
    character are asked for.  So its states are sets of the positions at which a match may have
    begun, and `"([^"]|\\\\"){0,20}"` has a million of them.  A character before the expression that
    is absent from its texts (or "" if none is known) keeps a match from beginning later.
    """
    from outlines_core import Index, Vocabulary

    letters = Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})

    def answer(request: bytes) -> _Answer:
        fields = json.loads(request)
        begin = fields["absent"]
        before = "".join(f"\\x{{{ord(letter):x}}}" for letter in begin)
        try:
            # An index stops at the first match that it prefers (`a|ab` has no "ab"), and drops
            # bytes after a match.  With an end of its own, every match is at the end.
            index = Index(f"{before}(?:{fields['expression']})\\x{{{ord(END):X}}}", letters)
        except MemoryError:
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            # It says so of a state from which no byte leads to a text.
            nothing = "Found no transitions" in str(error)
            return {"states": 0} if nothing else {"refused": _text(error)}
        moves, final, start = (
            index.get_transitions(), index.get_final_states(), index.get_initial_state(),
        )  # fmt: skip
        for byte in begin.encode():
            start = moves.pop(start)[byte]
        order = {start: 0}
        for state in (*moves, *(after for ways in moves.values() for after in ways.values())):
            order.setdefault(state, len(order))
        if len(order) > STATES:
            return {"many": STATES}
        table = array.array("h", [-1]) * (256 * len(order))
        for state, ways in moves.items():
            for byte, after in ways.items():
                if byte < 256:  # 256 stands for the end
                    table[256 * order[state] + byte] = order[after]
        if sys.byteorder == "big":
            table.byteswap()
        ended = sorted(order[state] for state in final if state in order)
        encoded = base64.b64encode(table.tobytes()).decode()
        return {"states": len(order), "table": encoded, "ended": ended, "end": END}

    return answer


def _growth(part: object) -> float:
    """Returns the greatest factor by which a normalizer or decoder can lengthen a text."""
    if isinstance(part, list):
        factor = 1.0
        for step in part:
            factor = min(factor * _growth(step), 1e300)
        return factor
    if not isinstance(part, dict):
        return 1.0
    if part.get("type") == "Sequence":
        return _growth(part.get("normalizers")) * _growth(part.get("decoders"))
    content, pattern = part.get("content"), part.get("pattern")
    if part.get("type") != "Replace" or not isinstance(content, str):
        return 1.0
    # A regular expression may match nothing, and so add its content to every character.
    matched = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(matched, str) and matched:
        return max(1.0, len(content.encode()) / len(matched.encode()))
    return len(content.encode()) + 1.0


def _text(error: BaseException) -> str:
    """Returns an error as a line that can be sent."""
    try:
        text = f"{error}" or type(error).__name__
    except ValueError:  # Python does not print an int of more than 4300 digits
        text = type(error).__name__
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


JOBS: dict[str, Callable[[], _Job]] = {
    "expressions": expressions, "templates": templates, "tokenizers": tokenizers,
}  # fmt: skip


def _confine() -> None:
    """Gives up reading and writing files, as far as the system supports it."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        most = 1 + max(3, *(int(name) for name in os.listdir("/dev/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _limit(seconds: float, length: int) -> None:
    """Ends this process after `seconds` of processor time, and bounds its memory."""
    with contextlib.suppress(AttributeError, ImportError, ValueError, OSError):
        signal.setitimer(signal.ITIMER_PROF, seconds)  # the default action ends the process
        import resource

        memory = MEMORY + PER_BYTE * length
        resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))


def main() -> None:
    sys.path[:] = json.loads(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    job = JOBS[sys.argv[1]]()
    reader, writer = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    _confine()
    for line in reader:
        head = json.loads(line)
        request = reader.read(head["length"])
        _limit(head["seconds"], head["length"])
        try:
            answer = job(request)
        except MemoryError:
            answer = {"memory": MEMORY + PER_BYTE * head["length"]}
        writer.write(json.dumps(answer).encode() + b"\n")
        writer.flush()
        _limit(0, 0)


if __name__ == "__main__":
    main()
