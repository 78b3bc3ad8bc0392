"""`python -m train.export` runs the job `specjax.training.jobs.export`."""

from specjax.training.jobs.export import main

if __name__ == "__main__":
    main()
