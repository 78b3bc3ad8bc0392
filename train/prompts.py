"""`python -m train.prompts`: the job that `specjax train prompts` runs, too."""

from specjax.options.command import run
from specjax.training.jobs.prompts import main

if __name__ == "__main__":
    run(main)
