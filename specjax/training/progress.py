"""Shows a training loop: a progress bar on stderr, and lines on stdout."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable

from tqdm import tqdm

from specjax.parallel import leader


class Progress:
    """Shows the steps of a run.

    A stream that closes while a step runs must not lose the step.  So no method raises `OSError`;
    the loop looks at `closed`, saves, and leaves.

    Attributes:
      closed: the error of the first write to a stream that has closed; None until then.
    """

    def __init__(self, steps: int, step: int) -> None:
        self.closed: OSError | None = None
        self._steps, self._step = steps, step
        self._before = step, time.perf_counter()
        disable = None if leader() else True  # None: shown at a terminal
        self._bar = tqdm(total=steps, initial=step, unit="step", disable=disable)

    def advance(self, **values: str) -> None:
        """Advances by one step; `values` are shown next to the bar, or as a line of their own."""
        self._step += 1

        def show() -> None:
            self._bar.update()
            if values and self._bar.disable:
                figures = "  ".join(f"{name} {value}" for name, value in values.items())
                self._print(f"step {self._step} of {self._steps}: {figures}  left {self._left()}")
            elif values:
                self._bar.set_postfix(values)

        self._try(show)

    def _left(self) -> str:
        """Returns the time that the remaining steps take at the speed since the line before."""
        (step, began), now = self._before, time.perf_counter()
        self._before = self._step, now
        seconds = (now - began) / (self._step - step) * (self._steps - self._step)
        return str(datetime.timedelta(seconds=round(seconds)))

    def say(self, text: str) -> None:
        """Prints a line."""

        self._try(lambda: self._print(text))

    def _print(self, text: str) -> None:
        if leader():
            self._bar.write(text)
            sys.stdout.flush()

    def close(self) -> None:
        self._try(self._bar.close)

    def _try(self, show: Callable[[], object]) -> None:
        if self.closed is not None:
            return
        try:
            show()
        except BlockingIOError:  # the reader is slow, and only this line is lost
            pass
        except OSError as error:
            self.closed = error
