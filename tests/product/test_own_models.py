"""A user's own model, in any library, with every proposer; `tests/core/test_adapters_decode.py`
has each kind of cache once."""

import own_models
import pytest
from own_decoders import CACHED, decoded, naive, run
from toys import TABLES as toys

CASES = [
    *((name, proposer) for name in own_models.NAMES for proposer in ("none", "draft", "ngram")),
    (CACHED, "tree"),
]


@pytest.mark.parametrize(("name", "proposer"), CASES)
def test_greedy_speculation_is_greedy_decoding(name, proposer):
    """Prompts and limits are ragged and go up to the last position that the model knows."""
    texts, stats = decoded(name, proposer, 0.0)
    assert texts == naive(name)
    assert max(map(len, texts)) == toys.CAPACITY
    if proposer in ("draft", "tree"):
        assert 0 < stats.accepted.sum() < stats.tested.sum()


@pytest.mark.parametrize(("name", "proposer"), CASES)
def test_same_key_same_tokens(name, proposer):
    """At temperature 1 every proposer gives the text of plain decoding."""
    texts = decoded(name, proposer, 1.0)[0]
    assert texts == decoded(name, "none", 1.0)[0] != naive(name)


@pytest.mark.parametrize("name", own_models.NAMES)
def test_a_row_alone_is_that_row_in_a_batch(name):
    """A row sampled with a draft does not depend on the rows beside it."""
    for row in range(toys.ROWS):
        alone = run(name, "draft", rows=[row], temperature=1.0)
        assert toys.texts(alone) == decoded(name, "draft", 1.0)[0][row : row + 1]
