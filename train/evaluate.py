"""`python -m train.evaluate`: the job that `specjax train evaluate` runs, too."""

from specjax.training.jobs.evaluate import main
from specjax.training.options import run

if __name__ == "__main__":
    run(main)
