"""python -m specjax <command>.  A command is one file in `specjax.commands` and one line in its table."""

from specjax.commands import main

if __name__ == "__main__":
    main()
