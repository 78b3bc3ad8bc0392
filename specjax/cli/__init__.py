"""The command line: `specjax <command>`, or `python -m specjax <command>`."""

from __future__ import annotations

import argparse
import warnings

from specjax import __version__
from specjax.cli import audit, bench, datastore, demo, generate, inspect, serve, train, tune
from specjax.flags import ending, open_streams, say
from specjax.parallel import join_from, leaving

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "demo": demo,
    "generate": generate,
    "bench": bench,
    "audit": audit,
    "inspect": inspect,
    "tune": tune,
    "datastore": datastore,
    "serve": serve,
    "train": train,
}
"""The module of each command, with `HELP`, `add_arguments(parser)` and `run(arguments)`."""


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of an option, unless it is None, False or empty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        hidden = action.default is False or action.default in (None, [], [None])
        return action.help if hidden else super()._get_help_string(action)


def main(argv: list[str] | None = None) -> None:
    """Runs a command; an error that a user can fix prints a line on stderr, with status 2."""
    open_streams()
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
    name = f"specjax {arguments.command}"
    with leaving(), ending(name):
        join_from(vars(arguments))
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: say(f"{name}: {message}")
            COMMANDS[arguments.command].run(arguments)
