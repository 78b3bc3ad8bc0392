"""The command line: `specjax <command>`, or `python -m specjax <command>`."""

from __future__ import annotations

import importlib
import sys
import warnings

from specjax._internal.collecting import collecting_rarely
from specjax.options.choice import chosen
from specjax.options.compiled import keep_compiled
from specjax.options.exits import ending, open_streams, say

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "demo": "show the text, the speed, and that no proposer changes a token, on the shipped models",
    "generate": "continue a prompt with speculation, and compare with plain decoding",
    "bench": "measure the acceptance and the speed of proposers, numbers of drafts and rules",
    "evaluate": "score the texts of checkpoint after checkpoint, with paired intervals",
    "audit": "compare a proposer and a rule with plain decoding; status 1 if a claim is broken",
    "inspect": "describe a published drafter from its configuration and headers, without weights",
    "tune": "measure what drafts cost and gain, and write a plan that generate starts from",
    "datastore": "build a datastore of texts for the proposer datastore, or describe one",
    "quantise": "write a model's folder with its matrices in 4 or 8 bits, and compare both",
    "serve": "serve OpenAI's and LoRAX's API over HTTP; a text does not depend on load",
    "train": "train drafts and heads, and measure",
}
"""The help of each command.  Its module has `main(prog, argv)`, and is imported when it runs."""


def main(argv: list[str] | None = None) -> None:
    """Runs a command; an error that a user can fix prints a line on stderr, with status 2."""
    open_streams()
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--version"]:
        from specjax import __version__

        print(f"specjax {__version__}")
        sys.exit(0)
    about = "Lossless speculative decoding in JAX."
    command, rest = chosen("specjax", "command", COMMANDS, argv, about)
    keep_compiled()
    from specjax.parallel import leaving

    name = f"specjax {command}"
    with collecting_rarely(), leaving(), ending(name), warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say(f"{name}: {message}")
        importlib.import_module(f"specjax.cli.{command}").main(name, rest)
