"""`python -m train.drafter`: the job that `specjax train drafter` runs, too."""

from specjax.training.jobs.drafter import main
from specjax.training.options import run

if __name__ == "__main__":
    run(main)
