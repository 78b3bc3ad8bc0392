"""`python -m train.drafter`: the job that `specjax train drafter` runs, too."""

from specjax.options.command import run
from specjax.training.jobs.drafter import main

if __name__ == "__main__":
    run(main)
