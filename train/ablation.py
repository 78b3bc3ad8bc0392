"""`python -m train.ablation`: the job that `specjax train ablation` runs, too."""

from specjax.training.jobs.ablation import main

if __name__ == "__main__":
    main()
