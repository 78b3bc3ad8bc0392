"""`python -m train.export`: the job that `specjax train export` runs, too."""

from specjax.training.jobs.export import main

if __name__ == "__main__":
    main()
