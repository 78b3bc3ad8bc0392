"""`python -m train.ablation`: what `specjax train ablation` runs in a checkout, too."""

from experiments.ablation import main
from specjax.options.command import run

if __name__ == "__main__":
    run(main)
