"""`python -m train.prompts`: the job that `specjax train prompts` runs, too."""

from specjax.training.jobs.prompts import main
from specjax.training.options import run

if __name__ == "__main__":
    run(main)
