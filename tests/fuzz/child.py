"""The process that runs cases: `python -m tests.fuzz.child KIND SEED FOLDER`, until it is ended.

It writes "ready", and then a line "SEED OUTCOME" for each case.
"""

from __future__ import annotations

import importlib
import itertools
import os
import pathlib
import sys
import warnings


def main() -> None:
    kind, first, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
    warnings.simplefilter("ignore")
    lines = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no line
    from specjax import kernels
    from tests.fuzz import law
    from tests.fuzz.kinds import KINDS

    if kernels.usable():  # LLVM is loaded once, which no case may be blamed for
        importlib.import_module("specjax.kernels.calling")
    made, watch = KINDS[kind](folder), law.Watch(folder)
    law.limit_memory()
    os.write(lines, b"ready\n")
    for seed in itertools.count(first):
        outcome = watch.judge(made.case(law.rng_of(kind, seed)))
        os.write(lines, f"{seed} {outcome}\n".encode())


if __name__ == "__main__":
    main()
