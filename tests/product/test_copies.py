"""No step copies a cache of a transformer."""

import pytest
from copied import check_copies
from toys import TRANSFORMERS


@pytest.mark.parametrize("case", ["none", "draft 3", "ngram", "early exit", "draft tree"])
def test_a_step_copies_no_cache(case):
    check_copies(TRANSFORMERS, case)
