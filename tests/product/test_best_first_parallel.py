"""Trees of the best candidates of a head that predicts several tokens in one pass."""

from toys import TRANSFORMERS as toys

from specjax import RULES, Decoder, Params
from specjax.proposers import BestFirst


def test_the_tree_of_a_parallel_head_changes_no_text():
    """P-EAGLE's predictions, too, are of one pass; drafts are accepted and rejected."""
    source, arrays = toys.CASES["peagle tree"][0].source, toys.CASES["peagle tree"][1]
    dec = Decoder(toys.model(), BestFirst(source, 7, 3), RULES["match"](), (toys.EOS,), 48)
    params = Params(toys.weights(), arrays)
    for temperature in (0.0, 1.0):
        state = dec.run(params, toys.prefill(dec, params, temperature=temperature))
        assert toys.texts(state) == toys.decoded("none", "match", temperature)[0]
        assert 0 < state.stats.accepted.sum() < state.stats.tested.sum()
