"""`python -m train.generate`: the job that `specjax train generate` runs, too."""

from specjax.options.command import run
from specjax.training.jobs.generate import main

if __name__ == "__main__":
    run(main)
