"""The forms of other platforms, run on this one, write the same texts over a transformer."""

import jax
import pytest
from toys import TRANSFORMERS as toys


@pytest.fixture(params=["tpu", "gpu"])
def elsewhere(request, monkeypatch):
    """Every choice falls as on another platform."""

    def choose(*operands, default, **forms):
        return forms.get(request.param, default)(*operands)

    def go():
        jax.clear_caches()
        monkeypatch.setattr(jax.lax, "platform_dependent", choose)

    yield go
    monkeypatch.undo()
    jax.clear_caches()


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
