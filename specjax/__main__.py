"""`python -m specjax <command>` runs a command of `specjax.commands`."""

from specjax.commands import main

if __name__ == "__main__":
    main()
