"""`python -m train.ablation`: the job that `specjax train ablation` runs, too."""

from specjax.options.command import run
from specjax.training.jobs.ablation import main

if __name__ == "__main__":
    run(main)
