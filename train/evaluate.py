"""`python -m train.evaluate` runs the job `specjax.training.jobs.evaluate`."""

from specjax.training.jobs.evaluate import main

if __name__ == "__main__":
    main()
