"""Internal functions of the other packages: checks of arguments, platforms, kept programs."""
