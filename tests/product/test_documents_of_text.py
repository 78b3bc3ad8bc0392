"""`documents=` of a target with a tokenizer, and behind a lookup that comes first."""

from command_line import TINY

import specjax


def test_documents_of_text():
    """Texts are read with the target's tokenizer."""
    tiny = specjax.load(TINY / "target")
    answer = specjax.generate(tiny, "the cat", max_new_tokens=20)
    made = specjax.generate(
        tiny, "the cat", max_new_tokens=20, proposer="ngram", num_drafts=4,
        documents=["the cat" + answer.text[0]],
    )  # fmt: skip
    assert made.tokens == answer.tokens
    assert made.stats.mean_accepted_length > 1


def test_a_lookup_before_a_datastore():
    """Both look up in the documents of the call, and the text stays that of plain decoding."""
    tiny = specjax.load(TINY / "target")
    answer = specjax.generate(tiny, "the cat", max_new_tokens=20)
    drafter = specjax.Datastore.build([[1, 2, 3]], vocab_size=tiny.model.vocab_size).drafter(tiny)
    made = specjax.generate(
        tiny, "the cat", max_new_tokens=20, documents=["the cat" + answer.text[0]],
        drafter=specjax.first_of(specjax.NGram(), drafter),
    )  # fmt: skip
    assert made.tokens == answer.tokens
    assert made.stats.mean_accepted_length > 2
