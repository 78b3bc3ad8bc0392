"""What every case must obey, and how a case is judged.

A case is refused by a ValueError or an OSError whose message names the file or the argument, or
it works.  It raises nothing else, takes no more than `SECONDS`, needs no more than `MEMORY` beyond
what the process has, executes nothing and opens nothing outside its folder.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import random
import resource
import sys
from collections.abc import Callable

SECONDS = 20.0
MEMORY = 2**30

REFUSED, WORKS = "refused", "works"
OBEYED = (REFUSED, WORKS)

_FORBIDDEN = (
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system",
    "pickle.find_class", "pty.spawn", "socket.connect", "socket.getaddrinfo", "subprocess.Popen",
    "ctypes.dlopen",
)  # fmt: skip
_LONGEST = 20_000  # characters of a message


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing that a user may do."""

    act: Callable[[], object]
    names: tuple[str, ...]  # a refusal has one of these words
    check: Callable[[object], None] | None = None  # of what `act` returns; raises AssertionError
    refused: bool = False  # the case must not work: it asks for a file outside its folder


class Watch:
    """Notes what Python opens and starts while a case runs."""

    def __init__(self, place: pathlib.Path) -> None:
        roots = {sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), os.getcwd()}
        roots |= {os.path.realpath(root) for root in roots}
        self._allowed = (*sorted(roots), str(place), "/proc/", "/sys/", "/dev/fd", "/dev/null")
        self._allowed += tuple(path for path in sys.path if path)
        self._active = False
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self._active:
            return
        if event in _FORBIDDEN and "confined.py" not in str(arguments):
            self.seen.append(f"executes {event} {str(arguments)[:80]}")
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith(self._allowed):
                self.seen.append(f"opens {path}")

    def judge(self, case: Case) -> str:
        """`REFUSED`, `WORKS`, or what is wrong."""
        self.seen, self._active = [], True
        try:
            result = case.act()
            if case.check is not None:
                case.check(result)
            outcome = "works, and should be refused" if case.refused else WORKS
        except MemoryError:
            outcome = "memory"
        except AssertionError as error:
            outcome = f"broken {_line(error)}"
        except (ValueError, OSError) as error:
            outcome = _judge_message(error, case.names)
        except BaseException as error:  # panics of Rust are no Exceptions
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome = f"raw {type(error).__name__} {_line(error)}"
        finally:
            self._active = False
        return self.seen[0] if self.seen else outcome


def _judge_message(error: ValueError | OSError, names: tuple[str, ...]) -> str:
    if type(error) is not ValueError and not isinstance(error, OSError):
        return f"raw {type(error).__name__} {_line(error)}"
    message = str(error)
    if not any(name in message for name in names):
        return f"nameless {_line(error)}"
    if len(message) > _LONGEST:
        return f"a message of {len(message)} characters {_line(error)}"
    return REFUSED


def _line(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except ValueError:
        text = "a message that cannot be written"
    return text.encode("ascii", "replace").decode()[:200]


def limit_memory() -> None:
    """From here on this process may take `MEMORY` more.  Mapped files do not count."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        held = next(line for line in status.read_text().splitlines() if line.startswith("VmData"))
        most = int(held.split()[1]) * 1024 + MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def rng_of(kind: str, seed: int) -> random.Random:
    """The randomness of one case, the same in every process."""
    return random.Random(f"{kind}:{seed}")
