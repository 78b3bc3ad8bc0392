"""`python -m train.distill`: the job that `specjax train distill` runs, too."""

from specjax.options.command import run
from specjax.training.jobs.distill import main

if __name__ == "__main__":
    run(main)
