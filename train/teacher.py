"""`python -m train.teacher`: the job that `specjax train teacher` runs, too."""

from specjax.options.command import run
from specjax.training.jobs.teacher import main

if __name__ == "__main__":
    run(main)
