"""Turns the errors of the tokenizers library into a ValueError.

It is written in Rust.  A panic there is a BaseException, which `except Exception` does not catch;
other faults are plain `Exception`s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def no_panic(what: str) -> Iterator[None]:
    """Raises ValueError with `what` and a cure if the tokenizers library fails in this block."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:400]
        raise ValueError(
            f"{what}: the tokenizer fails ({reason}); use another text, or get the model's "
            "tokenizer.json again"
        ) from None
