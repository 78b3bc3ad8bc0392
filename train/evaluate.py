"""`python -m train.evaluate`: the job that `specjax train evaluate` runs, too."""

from specjax.options.command import run
from specjax.training.jobs.evaluate import main

if __name__ == "__main__":
    run(main)
