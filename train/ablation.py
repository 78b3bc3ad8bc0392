"""`python -m train.ablation` runs the job `specjax.training.jobs.ablation`."""

from specjax.training.jobs.ablation import main

if __name__ == "__main__":
    main()
