"""What the other rooms share, and no user needs: checks of arguments, platforms, kept programs."""
