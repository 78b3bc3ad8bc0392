"""`python -m train.pretrain`: the job that `specjax train pretrain` runs, too."""

from specjax.training.jobs.pretrain import main
from specjax.training.options import run

if __name__ == "__main__":
    run(main)
