"""`python -m train.medusa`: the job that `specjax train medusa` runs, too."""

from specjax.training.jobs.medusa import main
from specjax.training.options import run

if __name__ == "__main__":
    run(main)
