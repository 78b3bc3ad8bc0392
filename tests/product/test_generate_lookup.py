"""The laws of `generate` with prompt lookup; `tests/core/test_generate.py` has them with a draft
model and without drafts."""

import generated
import pytest

import specjax

LOOKUP = {"proposer": specjax.NGram(min_ngram=1)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_of_a_batch_is_the_prompt_alone(temperature):
    generated.check_rows_alone(temperature, **LOOKUP)


def test_stop_and_seed():
    generated.check_stop(**LOOKUP)


def test_stream_of_a_list():
    generated.check_stream(**LOOKUP)


@pytest.mark.parametrize("rule", [specjax.Match(), specjax.Rejection()], ids=["match", "rejection"])
def test_stats_add_up(rule):
    generated.check_stats(rule, **LOOKUP)
