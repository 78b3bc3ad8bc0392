"""`python -m train.distill`: the job that `specjax train distill` runs, too."""

from specjax.training.jobs.distill import main
from specjax.training.options import run

if __name__ == "__main__":
    run(main)
