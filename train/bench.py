"""`python -m train.bench`: the measurements of `bench.training`."""

from bench.training import main
from specjax.options.command import run

if __name__ == "__main__":
    run(main)
