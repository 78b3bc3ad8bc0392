"""The command line: `specjax <command>`, or `python -m specjax <command>`."""

from __future__ import annotations

import argparse
import sys
import warnings

from specjax import __version__
from specjax.commands import audit, bench, generate, inspect, train
from specjax.parallel import join_from, leaving

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "generate": generate,
    "bench": bench,
    "audit": audit,
    "inspect": inspect,
    "train": train,
}
"""Name -> module with `HELP`, `add_arguments(parser)` and `run(arguments)`."""


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of an option, unless it is None, False or empty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        hidden = action.default is False or action.default in (None, [], [None])
        return action.help if hidden else super()._get_help_string(action)


def main(argv: list[str] | None = None) -> None:
    """Run a command; an error that a user can fix prints one line on stderr, with exit status 2."""
    parser = argparse.ArgumentParser(
        prog="specjax", description="Lossless speculative decoding in JAX."
    )
    parser.add_argument("--version", action="version", version=f"specjax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            formatter_class=_Help,
        )
        module.add_arguments(command)
    arguments = parser.parse_args(argv)
    with leaving():
        _run(arguments)


def _run(arguments: argparse.Namespace) -> None:
    try:
        join_from(vars(arguments))
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print(
                f"specjax {arguments.command}: {message}", file=sys.stderr
            )
            COMMANDS[arguments.command].run(arguments)
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        print(f"specjax {arguments.command}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
