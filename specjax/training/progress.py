"""What a training loop shows: a progress bar on stderr, and lines on stdout."""

from __future__ import annotations

import sys
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
        disable = None if leader() else True  # None: shown at a terminal
        self._bar = tqdm(total=steps, initial=step, unit="step", disable=disable)

    def advance(self, **values: str) -> None:
        """One step more; `values` are shown beside the bar."""

        def show() -> None:
            self._bar.update()
            if values:
                self._bar.set_postfix(values)

        self._try(show)

    def say(self, text: str) -> None:
        """Print a line."""

        def show() -> None:
            self._bar.write(text)
            sys.stdout.flush()

        self._try(show)

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
