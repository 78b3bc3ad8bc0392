"""The laws of `generate` with prompt lookup and with a draft model; `tests/core/test_generate.py`
has some of them, and those without drafts."""

import generated
import language_models
import pytest

import specjax

LOOKUP = {"proposer": specjax.NGram(min_ngram=1)}
DRAFT = {"proposer": "draft", "draft": language_models.draft(), "num_drafts": 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("how", [LOOKUP, DRAFT], ids=["lookup", "draft"])
def test_row_of_a_batch_is_the_prompt_alone(how, temperature):
    generated.check_rows_alone(temperature, **how)


def test_stop_and_seed():
    generated.check_stop(**LOOKUP)


def test_stream_of_a_list():
    generated.check_stream(**LOOKUP)


@pytest.mark.parametrize("rule", [specjax.Match(), specjax.Rejection()], ids=["match", "rejection"])
@pytest.mark.parametrize("how", [LOOKUP, DRAFT], ids=["lookup", "draft"])
def test_stats_add_up(how, rule):
    generated.check_stats(rule, **how)
