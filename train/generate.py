"""`python -m train.generate`: the job that `specjax train generate` runs, too."""

from specjax.training.jobs.generate import main
from specjax.training.options import run

if __name__ == "__main__":
    run(main)
