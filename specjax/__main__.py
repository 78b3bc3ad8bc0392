"""python -m specjax <command>.  A command is a file in `specjax.commands` and a line in a table."""

from specjax.commands import main

if __name__ == "__main__":
    main()
