"""`python -m specjax <command>` runs a command of `specjax.cli`."""

from specjax.cli import main

if __name__ == "__main__":
    main()
