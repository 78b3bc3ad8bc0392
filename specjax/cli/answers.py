"""Scores answers: exact match for GSM8K, HumanEval's tests in a child process with limits."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys
import tempfile

from specjax.cli.questions import Question

SECONDS = 10.0
"""The processor time of a program that a model wrote; three times as long by the clock."""

MEMORY = 1 << 30
"""The most bytes of such a program."""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_ENDS = re.compile(r"^(?=\S)", re.MULTILINE)

_LIMITS = """\
import resource, sys
for kind, most in ((resource.RLIMIT_CPU, {seconds}), (resource.RLIMIT_AS, {memory}),
                   (resource.RLIMIT_FSIZE, 1 << 20), (resource.RLIMIT_CORE, 0),
                   (resource.RLIMIT_NOFILE, 16)):
    resource.setrlimit(kind, (most, most))
"""


def right_number(question: Question, text: str) -> bool:
    """Returns whether the last number of a text is the answer of a question of GSM8K."""
    numbers = _NUMBER.findall(text)
    if not numbers or question.answer is None:
        return False
    return float(numbers[-1].replace(",", "")) == float(question.answer)


def program(question: Question, text: str, chat: bool) -> str:
    """Returns the program that checks an answer to a question of HumanEval.

    In a chat the first fenced block is the answer, and without one the whole text.  A plain text
    goes on with the function, and ends before its first line that is not indented.
    """
    assert question.plain is not None and question.test is not None
    if chat:
        found = _FENCE.search(text)
        code = text if found is None else found.group(1)
        # The imports and helpers of the prompt, which an answer may leave out.
        body = f"{question.plain}\n    pass\n\n{code}"
    else:
        end = _ENDS.search(text, text.find("\n") + 1 if "\n" in text else len(text))
        body = question.plain + (text if end is None else text[: end.start()])
    return f"{body}\n\n{question.test}\n\ncheck({question.entry})\n"


def passes(question: Question, text: str, chat: bool) -> bool:
    """Runs a program that a model wrote, and returns whether HumanEval's test passes.

    It runs in a child process, in an empty folder, without this process's packages and environment
    and with limits of processor time, memory and files.  It could still read files of this user and
    use the network: nothing else protects the machine.
    """
    # A program that ends itself before its test has run does not print this.
    last = secrets.token_hex(16)
    limits = _LIMITS.format(seconds=int(SECONDS), memory=MEMORY)
    source = f"{limits}{program(question, text, chat)}\nprint({last!r})\n"
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "answer.py").write_text(source, encoding="utf-8")
        printed = pathlib.Path(folder) / "printed"
        with open(printed, "wb") as out:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", "answer.py"],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            status = child.wait(3 * SECONDS)
        except subprocess.TimeoutExpired:
            status = 1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return status == 0 and printed.read_text(errors="replace").endswith(f"{last}\n")


def score(question: Question, text: str, chat: bool) -> bool | None:
    """Returns whether an answer is right; None if the question has no answer to compare."""
    if question.answer is not None:
        return right_number(question, text)
    return None if question.test is None else passes(question, text, chat)
