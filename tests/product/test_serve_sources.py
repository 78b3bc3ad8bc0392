"""Heads on inner layers of the target, block drafts and trees in an engine."""

from __future__ import annotations

from toys import TABLES as toys

import specjax
from specjax import Request
from specjax.contract import Wrapper
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


class Own(Wrapper):
    """A drafter of one's own, which says nothing about prompts."""

    def propose(self, params, state, context):
        return self.inner.propose(self.own(params), state, context)


def test_beginnings_are_copied_for_every_drafter():
    """Of EAGLE-3, P-EAGLE, block drafts, a draft and a drafter of one's own: the drafts
    after a copied beginning are those after one that was read."""
    target = LanguageModel(toys.model(), toys.weights(), None, (toys.EOS,), "toy")
    names = ("eagle3 tree", "peagle tree", "block draft", "draft 3")
    drafters = {name: specjax.Drafter(*toys.CASES[name], name) for name in names}
    drafters["own"] = BoundDrafter(Own(specjax.NGram(3, min_ngram=1)))
    head = [3 + n % 7 for n in range(18)]
    with Engine(target, drafters, slots=2, capacity=48, chunk=8) as made:

        def submit(name: str, last: int):
            return made.submit(
                Request(prompts=[[*head, last]], proposer=name, max_new_tokens=12, seed=last)
            )

        for name in drafters:
            # The second takes the beginning from the first; then both slots hold other prompts.
            submit(name, 9).result(60)
            copied = submit(name, 2).result(60)
            for handle in [submit("none", 11), submit("none", 12)]:
                handle.result(60)
            read = submit(name, 2).result(60)
            assert (copied.copied, read.copied) == (16, 0), name
            assert copied.tokens == read.tokens
            counts = [(each.stats.tested, each.stats.accepted) for each in (copied, read)]
            assert counts[0] == counts[1] and counts[0][0] > 0, (name, counts)
