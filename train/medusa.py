"""`python -m train.medusa`: the job that `specjax train medusa` runs, too."""

from specjax.training.jobs.medusa import main

if __name__ == "__main__":
    main()
