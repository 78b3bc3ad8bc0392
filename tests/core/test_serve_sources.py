"""Heads on inner layers of the target, block drafts and trees in an engine."""

from __future__ import annotations

from toys import TABLES as toys

import specjax
from specjax import Request
from specjax.methods import BoundDrafter
from specjax.models import LanguageModel
from specjax.serve import Engine


def test_features_and_whole_prompts():
    """Toys: a head on inner layers of the target, which reads its prompt at the end, trees, and a
    row that drafts with both; each text is that of `generate`, alone and together."""
    target = LanguageModel(toys.model(), toys.weights(), None, (toys.EOS,), "toy")
    head, params = toys.CASES["eagle3 tree"]
    block, block_params = toys.CASES["block draft"]
    drafters = {
        "head": specjax.Drafter(head, params, "head"),
        "block": specjax.Drafter(block, block_params, "block"),
        "lookup": BoundDrafter(specjax.NGram(3, min_ngram=1)),
    }
    # Some prompts are longer than a chunk; `generate` reads all of them in two widths.
    asks = [("head", 1), ("block", 6), ("lookup+head", 21), ("none", 11), ("block", 21),
            ("head", 23)]  # fmt: skip
    with Engine(target, drafters, slots=2, capacity=48, chunk=16) as made:
        compiled = made.compiled()
        asked = [
            Request(
                prompts=[list(range(1 + n, 1 + n + length))],
                proposer=name,
                max_new_tokens=12,
                temperature=n % 2,
                seed=n,
            )
            for n, (name, length) in enumerate(asks)
        ]
        together = [handle.result(60) for handle in [made.submit(one) for one in asked]]
        for one, served in zip(asked, together, strict=True):
            assert made.submit(one).result(60).tokens == served.tokens
            plain = {"proposer": "none", "temperature": one.temperature, "seed": one.seed}
            output = specjax.generate(target, one.prompts, max_new_tokens=12, **plain)
            assert output.tokens[0] == served.tokens and output.finish[0] == served.finish
        assert sum(served.stats.accepted for served in together) > 0
        assert made.compiled() == compiled
