"""`python -m train.distill` runs the job `specjax.training.jobs.distill`."""

from specjax.training.jobs.distill import main

if __name__ == "__main__":
    main()
