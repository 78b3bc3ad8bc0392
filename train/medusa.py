"""`python -m train.medusa` runs the job `specjax.training.jobs.medusa`."""

from specjax.training.jobs.medusa import main

if __name__ == "__main__":
    main()
