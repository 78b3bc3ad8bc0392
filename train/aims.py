"""`python -m train.aims`: the measurements of `experiments.aims`."""

from experiments.aims import main
from specjax.options.command import run

if __name__ == "__main__":
    run(main)
