"""The laws of decoding over a transformer: every proposer under both kinds of noise, and every
rule."""

from typing import ClassVar

from laws import SHARED, Laws, pytest_generate_tests  # noqa: F401 - pytest calls it
from toys import KINDS, NOISE_KINDS, TRANSFORMERS, kind

from specjax import PROPOSERS, RULES
from specjax.methods import AssistantSource


class TestTransformerLaws(Laws):
    toys = TRANSFORMERS
    PAIRS = TRANSFORMERS.PAIRS
    INSERTED: ClassVar = [pair for pair in PAIRS if pair[1] in NOISE_KINDS]
    ALONE = INSERTED
    SAME_KEY: ClassVar = [(case, rule) for case in TRANSFORMERS.CASES for rule in SHARED]


def test_every_proposer_has_a_case():
    """New proposers, and new shapes over a source, must be added to the cases.

    An assistant reads the keys and values of its target, so its texts are those of plain decoding
    in `test_gemma_assistant.py`.
    """
    assert set(TRANSFORMERS.TABLE) == set(PROPOSERS)
    expected = [kind for kind in KINDS if AssistantSource not in kind]
    kinds = {case: kind(proposer) for case, (proposer, _) in TRANSFORMERS.CASES.items()}
    assert {(kinds[case], rule) for case, rule in TestTransformerLaws.PAIRS} >= {
        (kind, rule) for kind in expected for rule in NOISE_KINDS
    }
    assert {rule for _, rule in TestTransformerLaws.PAIRS} == set(RULES)
    assert len([kind for kind in expected if len(kind) == 2]) == 21
