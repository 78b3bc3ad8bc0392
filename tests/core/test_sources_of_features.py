"""Each source of drafts that reads features of the target, or its keys and values, without a
decoder.

`source_cases.py` says how they are driven.
"""

import pytest
from source_cases import OF_FEATURES, check_along_a_text, check_in_parts


@pytest.mark.parametrize("name", OF_FEATURES)
def test_logits_along_a_text_are_those_of_a_naive_pass(name):
    check_along_a_text(name)


@pytest.mark.parametrize("name", OF_FEATURES)
def test_a_prompt_that_is_read_in_parts_is_read(name):
    check_in_parts(name)
