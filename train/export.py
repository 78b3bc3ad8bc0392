"""`python -m train.export`: the job that `specjax train export` runs, too."""

from specjax.training.jobs.export import main
from specjax.training.options import run

if __name__ == "__main__":
    run(main)
