"""`specjax train JOB` trains models, drafts and heads, and measures; also `python -m train.JOB`."""

from __future__ import annotations

import argparse
import importlib
import sys

from specjax._internal.extras import install

HELP = "train drafts and heads: specjax train JOB --help shows the options of a job"

JOBS = {
    "pretrain": "specjax.training.jobs.pretrain",
    "distill": "specjax.training.jobs.distill",
    "medusa": "specjax.training.jobs.medusa",
    "drafter": "specjax.training.jobs.drafter",
    "generate": "specjax.training.jobs.generate",
    "teacher": "specjax.training.jobs.teacher",
    "evaluate": "specjax.training.jobs.evaluate",
    "export": "specjax.training.jobs.export",
    "ablation": "experiments.ablation",
    "prompts": "specjax.training.jobs.prompts",
}
"""The module of each job, with `main(argv)`, which is imported when the job runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", choices=list(JOBS), metavar="JOB", help=", ".join(JOBS))
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the job")


def run(arguments: argparse.Namespace) -> None:
    try:
        job = importlib.import_module(JOBS[arguments.job])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "specjax":
            raise
        if error.name.partition(".")[0] == "experiments":
            raise ImportError(
                f"specjax train {arguments.job} needs a checkout of specjax: clone its repository, "
                f"and run python -m train.{arguments.job} there"
            ) from None
        raise ImportError(f"{error.name} is not installed: {install('train')}") from None
    # The usage and the error messages of the job begin with this name.
    sys.argv[0] = f"specjax train {arguments.job}"
    job.main(arguments.options)
