"""The forms of other platforms, run on this one, write the same texts over a transformer."""

import pytest
from toys import TRANSFORMERS as toys


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        ("none", "match"), ("draft 3", "rejection"), ("dynamic tree", "match"),
        ("draft tree", "match"), ("ngram", "match"), ("medusa tree", "match"),
        ("universal", "match"),
    ],
)  # fmt: skip
def test_texts_are_the_same_in_every_form(case, rule, elsewhere):
    """Greedy and sampled, by the same programs."""
    wanted = [toys.decoded(case, rule, temperature)[0] for temperature in (0.0, 1.0)]
    elsewhere()
    decoder, params = toys.decoder(case, rule), toys.params(case)
    for temperature, texts in zip((0.0, 1.0), wanted, strict=True):
        state = toys.prefill(decoder, params, temperature=temperature)
        assert toys.texts(decoder.run(params, state)) == texts
