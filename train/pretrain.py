"""`python -m train.pretrain` runs the job `specjax.training.jobs.pretrain`."""

from specjax.training.jobs.pretrain import main

if __name__ == "__main__":
    main()
