"""`python -m train.pretrain`: the job that `specjax train pretrain` runs, too."""

from specjax.options.command import run
from specjax.training.jobs.pretrain import main

if __name__ == "__main__":
    run(main)
