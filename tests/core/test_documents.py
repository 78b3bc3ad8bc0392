"""`documents=`: texts in which prompt lookup and a datastore's proposer look up."""

import functools

import counted
import jax
import numpy as np
import pytest
from command_line import TINY
from toys import TABLES as toys

import specjax
from specjax.files.tokenizer import read_tokenizer
from specjax.generation.prompts import documents_of
from specjax.types import ABSENT

PROMPT = [5, 9, 3]


@functools.cache
def target():
    return specjax.LanguageModel(toys.model(), toys.weights(), name="toy")


def write(prompts, **options):
    return specjax.generate(target(), prompts, max_new_tokens=20, **options)


@functools.cache
def plain(temperature=0.0):
    return write([PROMPT, PROMPT], temperature=temperature)


def drafter():
    return specjax.Datastore.build([[1, 2, 3]], vocab_size=toys.VOCAB).drafter(target(), 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("how", ["ngram", "datastore"])
def test_the_answer_as_a_document(how, temperature):
    """A document that holds the answer is copied, and the text stays that of plain decoding."""
    using = {
        "ngram": {"proposer": specjax.NGram(3)},
        "datastore": {"drafter": drafter()},
    }[how]
    wanted = plain(temperature)
    # As long as each other, so that all calls run one program.
    answers = [[*PROMPT, *row] for row in wanted.tokens]
    settings = {"temperature": temperature, **using}
    each = write([PROMPT, PROMPT], documents=[[[1, 2], answers[0]], [answers[1]]], **settings)
    both = write([PROMPT, PROMPT], documents=answers, **settings)
    assert each.tokens == both.tokens == wanted.tokens
    assert min(each.stats.mean_accepted_length, both.stats.mean_accepted_length) > 2
    swapped = write([PROMPT, PROMPT], documents=[[answers[1]], [answers[0]]], **settings)
    assert swapped.tokens == wanted.tokens
    if temperature:  # the other row's text is no help
        assert swapped.stats.mean_accepted_length < each.stats.mean_accepted_length


def test_drafts_end_with_their_document():
    """A copied chain stops at the end of a document, and no suffix matches across it."""
    proposer = specjax.NGram(4, min_ngram=2)
    text = np.array([ABSENT, ABSENT, 7, 8, 9, ABSENT, 7, 8, 0, 0, 0, 0, 0], np.int32)
    tokens, parent = jax.jit(proposer._look_up)(text, np.int32(7), np.int32(8))
    assert tokens[:2].tolist() == [8, 9] and parent.tolist() == [ABSENT, 0] + [ABSENT] * 3
    text[2:5] = [5, 5, 9]
    tokens, parent = jax.jit(proposer._look_up)(text, np.int32(7), np.int32(8))
    assert (parent == ABSENT).all()


def test_other_documents_are_no_other_program():
    """Documents are padded to powers of two, so those of a similar length share a program."""
    short = {"proposer": specjax.NGram(3), "documents": [[1, 2, 3] * 7]}
    write([PROMPT, PROMPT], **short)
    before = len(counted.traces())
    write([PROMPT, PROMPT], **short | {"documents": [[4, 5] * 4, [6, 7, 8, 9] * 3]})
    assert counted.traces(before) == []


REFUSED = {
    "no proposer": (
        {"documents": [[1]], "proposer": "none"}, ["documents=", "NoProposer", "NGram()"],
    ),
    "a draft": ({"documents": [[1]], "draft": "self"}, ["documents=", "not used by a Chain"]),
    "a text alone": ({"documents": "abc"}, ["documents='abc'", "pass a list"]),
    "too few lists": (
        {"documents": [[[1]], [[2]], [[3]]]}, ["3 lists for 2 prompts", "one per prompt"],
    ),
    "an empty one": ({"documents": [[1], []]}, ["document 1 is empty"]),
    "a great token": ({"documents": [[1, 99]]}, ["document 0", "99", "vocabulary"]),
    "a text without a tokenizer": ({"documents": ["abc"]}, ["toy", "tokenizer"]),
    "too long": ({"documents": [[1] * (2**20 + 1)]}, ["1048579 tokens", "specjax.Datastore"]),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    """With the value and the cure, before anything is compiled."""
    options, parts = REFUSED[what]
    if what != "no proposer":
        options = {"proposer": specjax.NGram()} | options
    if options.get("draft") == "self":
        options = {"documents": [[1]], "draft": target(), "num_drafts": 4}
    with pytest.raises(ValueError) as caught:
        write([PROMPT, PROMPT], **options)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_documents_of_text():
    """Texts are read with the target's tokenizer, each before a gap; rows are padded in front to a
    power of two."""
    read = read_tokenizer(TINY / "target" / "tokenizer.json")
    toy = specjax.LanguageModel(toys.model(read.get_vocab_size()), None, read, name="toy")
    texts = [["the cat", [1, 2]], []]
    made = documents_of(toy, texts, 2, specjax.NGram())
    wanted = [ABSENT, *read.encode("the cat").ids, ABSENT, 1, 2, ABSENT]
    assert made.shape == (2, 16)
    assert made[0].tolist() == [ABSENT] * (16 - len(wanted)) + wanted
    assert (made[1] == ABSENT).all()
    long = documents_of(toy, [[1] * 15], 2, specjax.NGram())
    assert long.shape == (2, 32) and (long[0] == long[1]).all()
