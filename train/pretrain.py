"""`python -m train.pretrain`: the job that `specjax train pretrain` runs, too."""

from specjax.training.jobs.pretrain import main

if __name__ == "__main__":
    main()
