"""`python -m train.generate` runs the job `specjax.training.jobs.generate`."""

from specjax.training.jobs.generate import main

if __name__ == "__main__":
    main()
