"""The laws of decoding with every processor on, over a table model."""

from typing import ClassVar

import counted
import numpy as np
import pytest
from distributions import VOCAB, Distributions
from over import pytest_generate_tests  # noqa: F401 - pytest calls it
from processor_laws import OFF, ProcessorLaws, decoder, naive, processors, run
from table_sources import TableSource
from toys import TABLES as toys

from specjax import eos_of_rows
from specjax.proposers import StaticTree


class TestProcessors(ProcessorLaws):
    """Every shape warps its drafts by itself, so each has a pair, or is sampled."""

    toys = toys
    PAIRS: ClassVar = [
        ("none", "match"), ("draft 3", "rejection"), ("table dynamic tree", "match"),
        ("table choices", "rejection"),
    ]  # fmt: skip
    SAME_KEY: ClassVar = [pair for pair in PAIRS if pair[1] == "match"]
    INSERTED: ClassVar = [("draft 3", "rejection")]
    PERFECT: ClassVar = [("draft 3", "rejection")]
    BITS: ClassVar = []  # logits of tables are exact

    def test_samples_follow_the_target(self):
        tree = StaticTree(TableSource(VOCAB), (2, 1))
        self.check_samples(tree, Distributions(toys).rows, rows=3000)


@pytest.mark.parametrize("name", [*OFF, "function"])
def test_the_settings_are_worth_testing(name):
    """Every processor matters: without any one of them the text is another one."""
    assert naive(toys, name) != naive(toys)


def test_rows_of_another_kind_are_refused():
    """A batch that keeps no counts cannot take a row that needs them."""
    dec, arrays = decoder(toys, toys.CASES["none"][0], "match"), toys.params("none")
    plain = toys.prefill(toys.decoder("none", "match"), arrays)
    row = toys.prefill(dec, arrays, rows=[0], processors=processors())
    with pytest.raises(ValueError, match="every=True"):
        toys.decoder("none", "match").insert(plain, 0, row)


def test_numbers_do_not_trace():
    """Other penalties, words and temperatures reuse the compiled programs."""
    dec, arrays = decoder(toys, toys.CASES["draft 3"][0], "rejection"), toys.params("draft 3")
    run(toys, dec, arrays)
    state = toys.prefill(dec, arrays, processors=processors(0.125), temperature=0.7)
    before = len(counted.traces())
    state = toys.prefill(dec, arrays, processors=processors(0.25), temperature=0.8)
    dec.run(arrays, state)
    assert counted.traces(before) == []


def test_ends_of_each_row():
    """A row ends at its own EOS ids, and the others go on."""
    dec, arrays = toys.decoder("table chain", "match"), toys.params("table chain")
    whole = toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS, eos=())
    ends = [[], [whole[1][8]], [whole[2][9], whole[2][20]], [toys.EOS]]
    texts = toys.texts(dec.run(arrays, toys.prefill(dec, arrays, eos=eos_of_rows(ends))))
    for text, full, length, end in zip(texts, whole, toys.LENGTHS, ends, strict=True):
        at = next((n for n in range(length, len(full)) if full[n] in end), len(full))
        assert text == full[: at + 1]
    assert len({len(text) for text in texts}) == len(np.unique(toys.LENGTHS))
