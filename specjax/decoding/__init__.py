"""Decoding: prefill, then propose, verify and commit in a compiled loop."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.decoding.changed_rows import put_row
    from specjax.decoding.decoder import Decoder, Verification
    from specjax.decoding.host_grammar import Guided
    from specjax.decoding.inputs import RowInputs
    from specjax.decoding.logprobs import Logprobs
    from specjax.decoding.prefill import begin, eos_of_rows, slots_ahead, start
    from specjax.decoding.stats import (
        Summary,
        acceptance_rate,
        expected_accepted_length,
        mean_accepted_length,
        summarize,
    )
    from specjax.decoding.turns import WIDEST_TURN, Held, Turns

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "WIDEST_TURN",
    "Decoder",
    "Guided",
    "Held",
    "Logprobs",
    "RowInputs",
    "Summary",
    "Turns",
    "Verification",
    "acceptance_rate",
    "begin",
    "eos_of_rows",
    "expected_accepted_length",
    "mean_accepted_length",
    "put_row",
    "slots_ahead",
    "start",
    "summarize",
]
