"""`specjax train JOB` trains models, drafts and heads, and measures; also `python -m train.JOB`."""

from __future__ import annotations

import importlib
import sys

from specjax._internal.extras import install
from specjax.options.choice import chosen

JOBS = {
    "pretrain": "train a language model",
    "distill": "train a small draft to predict what the target would write",
    "medusa": "train heads that predict later tokens from a target's hidden states",
    "drafter": "train a drafter that reads hidden states of its target",
    "generate": "let the target write a dataset to train a draft on",
    "teacher": "record what a target says about a data set, to train drafts from it",
    "evaluate": "measure speculation with a target and a proposer on prompts",
    "export": "convert a draft or Medusa heads for an engine, or heads for specjax",
    "ablation": "train a draft per loss and kind of data, and compare their tau",
    "prompts": "write a file of prompts",
}
"""The help of each job.  Its module has `main(argv)`, and is imported when the job runs."""

EXPERIMENTS = ("ablation",)
"""The jobs whose modules are in `experiments/`, which a checkout has and the wheel does not."""


def main(prog: str, argv: list[str]) -> None:
    name, rest = chosen(prog, "job", JOBS, argv, "Train drafts and heads, and measure.")
    package = "experiments" if name in EXPERIMENTS else "specjax.training.jobs"
    try:
        job = importlib.import_module(f"{package}.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "specjax":
            raise
        if error.name.partition(".")[0] == "experiments":
            raise ImportError(
                f"{prog} {name} needs a checkout of specjax: clone its repository, "
                f"and run python -m train.{name} there"
            ) from None
        raise ImportError(f"{error.name} is not installed: {install('train')}") from None
    # The usage and the error messages of the job begin with this name.
    sys.argv[0] = f"{prog} {name}"
    job.main(rest)
