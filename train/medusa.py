"""`python -m train.medusa`: the job that `specjax train medusa` runs, too."""

from specjax.options.command import run
from specjax.training.jobs.medusa import main

if __name__ == "__main__":
    run(main)
