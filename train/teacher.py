"""`python -m train.teacher`: the job that `specjax train teacher` runs, too."""

from specjax.training.jobs.teacher import main
from specjax.training.options import run

if __name__ == "__main__":
    run(main)
