"""The first word of a command line: a command, a job, or an action."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping

from specjax.options.exits import say


def chosen(
    prog: str, what: str, table: Mapping[str, str], argv: list[str], about: str
) -> tuple[str, list[str]]:
    """Returns the first word, which is a key of the table, and the words after it.

    Any other word ends the process with a message, and `--help` with the table.

    Args:
      prog: the words before it.
      what: what it is: a command, a job or an action.
      table: the help of each.
      argv: the arguments.
      about: the help of all of them.
    """
    if argv[:1] in (["-h"], ["--help"]):
        lines = "\n".join(f"  {name:<12}{text}" for name, text in table.items())
        print(f"usage: {prog} {what.upper()} [OPTIONS]\n\n{about}\n\n{what}s:\n{lines}\n")
        print(f"{prog} {what.upper()} --help shows the options of a {what}.")
        sys.exit(0)
    if argv and argv[0] in table:
        return argv[0], argv[1:]
    near = difflib.get_close_matches(argv[0], table, 1) if argv else []
    cure = f"is it {near[0]}?" if near else f"choose from {', '.join(table)}"
    fault = f"{argv[0]!r} is not one" if argv else "none was named"
    say(f"{prog}: error: {what}: {fault}; {cure}")
    sys.exit(2)
