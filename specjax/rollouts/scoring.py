"""`Score`: a user's function that says how good a text is."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax._internal.checks import number, shown
from specjax._internal.own_code import named, working_directory

_FORM = "a function (prompt, text) that returns a number, such as module:function"


class Score:
    """Calls `function(prompt, text)`, with the fields of a prompt's record that it has names for.

    Example:
      >>> from specjax.rollouts import Score
      >>> def right(prompt, text, answer):
      ...     return answer in text
      >>> score = Score(right)
      >>> score.check([{"answer": "42", "source": "a book"}])
      >>> score("6 * 7 =", " 42", {"answer": "42", "source": "a book"})
      1.0
    """

    def __init__(self, function: str | Callable[..., Any]) -> None:
        """Takes a function, or "module:function", which is also searched in the working directory.

        Raises:
          ValueError: it cannot be imported, or is no function.
        """
        self.name = function if isinstance(function, str) else getattr(function, "__name__", "?")
        made: Any = function
        if isinstance(function, str):
            with working_directory():
                made = named(function, "--score ")
        if not callable(made):
            raise ValueError(f"--score {self.name} is {shown(made)}; pass {_FORM}")
        try:
            self._signature = inspect.signature(made)
        except (TypeError, ValueError):  # some functions in C say nothing about themselves
            self._signature = inspect.signature(lambda prompt, text: None)
        self._function = made

    def check(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError for a record that lacks what the function asks for."""
        for index, fields in enumerate(records):
            try:
                self._signature.bind("", "", **self._taken(fields))
            except TypeError as error:
                raise ValueError(
                    f"--score {self.name} cannot be called as {self.name.rpartition(':')[2]}"
                    f"(prompt, text{''.join(f', {name}=' for name in self._taken(fields))}) for "
                    f"prompt {index}: {error}; pass {_FORM}, or add the field to each line of "
                    "--prompt-file"
                ) from None

    def __call__(self, prompt: object, text: str, fields: Mapping[str, Any]) -> float:
        """Returns the score of a text.

        Raises:
          ValueError: the function fails, or returns no finite number.
        """
        where = f"--score {self.name}"
        try:
            made = self._function(prompt, text, **self._taken(fields))
        except Exception as error:  # whatever a user's function may raise
            raise ValueError(f"{where} raised {type(error).__name__}: {error}") from error
        value = float(made) if isinstance(made, bool | np.bool_) else number(made)
        if value is None or not math.isfinite(value):
            raise ValueError(f"{where} returned {shown(made)}; it must return a finite number")
        return float(value)

    def _taken(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields that the function has parameters for, behind the first two."""
        parameters = [*self._signature.parameters.values()][2:]
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            return dict(fields)
        kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = {each.name for each in parameters if each.kind in kinds}
        return {name: value for name, value in fields.items() if name in names}
