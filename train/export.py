"""`python -m train.export`: the job that `specjax train export` runs, too."""

from specjax.options.command import run
from specjax.training.jobs.export import main

if __name__ == "__main__":
    run(main)
