"""`python -m train.prompts`: the job that `specjax train prompts` runs, too."""

from specjax.training.options import run
from specjax.training.prompts import main

if __name__ == "__main__":
    run(main)
