"""`python -m train.ablation`: the job that `specjax train ablation` runs, too."""

from specjax.training.jobs.ablation import main
from specjax.training.options import run

if __name__ == "__main__":
    run(main)
