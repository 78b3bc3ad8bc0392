"""A user's own model, in any library, keeps the laws of decoding as target and as draft."""

import own_models
import pytest
from own_decoders import CACHED, decoded, naive, noisy, run
from toys import TABLES as toys

import specjax

CASES = [("function", "draft"), (CACHED, "tree"), ("recurrent function", "draft")]
"""Every kind of cache: none, that of a user, and one state a row.  `test_adapters.py` checks every
model, and `tests/product/test_own_models.py` decodes with all of them and every proposer."""


@pytest.mark.parametrize(("name", "proposer"), CASES)
def test_greedy_speculation_is_greedy_decoding(name, proposer):
    """Prompts and limits are ragged and go up to the last position that the model knows."""
    texts, stats = decoded(name, proposer, 0.0)
    assert texts == naive(name)
    assert max(map(len, texts)) == toys.CAPACITY
    assert 0 < stats.accepted.sum() < stats.tested.sum()


@pytest.mark.parametrize(("name", "proposer"), CASES)
def test_same_key_same_tokens(name, proposer):
    """At temperature 1 every proposer gives the text of plain decoding."""
    texts, stats = decoded(name, proposer, 1.0)
    assert texts == decoded(name, "none", 1.0)[0]
    assert texts != naive(name)
    assert 0 < stats.accepted.sum() < stats.tested.sum()


def test_a_row_alone_is_that_row_in_a_batch():
    """A row sampled with a draft does not depend on the rows beside it."""
    name = "recurrent function"
    for row in range(toys.ROWS):
        assert (
            toys.texts(run(name, "draft", rows=[row], temperature=1.0))
            == decoded(name, "draft", 1.0)[0][row : row + 1]
        )


def test_with_a_cache_and_without_is_one_model():
    """The plain function and its cached form agree."""
    assert naive(CACHED) == naive("function")
    assert decoded(CACHED, "tree", 1.0)[0] == decoded("function", "none", 1.0)[0]


def test_generate_takes_a_model_of_ones_own():
    """A LanguageModel needs no tokenizer, no EOS and no name."""
    model, params = own_models.own(CACHED)
    target, draft = (specjax.LanguageModel(model, arrays) for arrays in (params, noisy(CACHED)))
    how = {"max_new_tokens": 20, "proposer": "draft", "draft": draft}
    out = specjax.generate(target, [[1, 2, 3], [4]], num_drafts=2, **how)
    plain = specjax.generate(target, [[1, 2, 3], [4]], num_drafts=0, **how)
    assert out.tokens == plain.tokens
    assert 0 < out.stats.acceptance_rate < 1
    assert out.text == ["", ""]
    assert target.num_params == sum(leaf.size for leaf in params.values())
    with pytest.raises(ValueError, match="the target 'model' reads at most 48"):
        specjax.generate(target, [[1, 2, 3]], max_new_tokens=46)
