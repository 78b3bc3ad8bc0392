"""What a transformer writes under constraints, with every kind of drafts."""

import json
import re

import folders
import jsonschema
import numpy as np
import pytest

import specjax
from specjax import Choice, JSONSchema, Regex

SCHEMA = {
    "type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "integer"}]}, "minItems": 2,
}  # fmt: skip
CONSTRAINTS = [
    Regex("(the|a) [a-z]{3,5}( sat| ran)?"), None, JSONSchema(SCHEMA, ""), Choice(["cat", "rat"]),
]  # fmt: skip
PROMPTS = ["the cat sat", "and the dog", "then the rat", "the"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate(temperature):
    """One constraint a prompt: valid texts, equal with every proposer, streamed or not."""
    target, draft = specjax.load(folders.target()), specjax.load(folders.draft())
    options = {"constraint": CONSTRAINTS, "max_new_tokens": 24, "temperature": temperature,
               "logprobs": 1, "seed": 3}  # fmt: skip
    plain = specjax.generate(target, PROMPTS, proposer="none", **options)
    assert re.fullmatch(CONSTRAINTS[0].expression, plain.text[0])
    jsonschema.validate(json.loads(plain.text[2]), SCHEMA)
    assert plain.text[3] in ("cat", "rat")
    assert all(np.isfinite(row.warped).all() for row in plain.logprobs)
    for how in ({"proposer": "forced"}, {"draft": draft, "num_drafts": 3}, {}):
        assert specjax.generate(target, PROMPTS, **how, **options).text == plain.text
    stream = specjax.generate(target, PROMPTS, proposer="forced", stream=True, **options)
    pieces = np.array(list(stream))
    assert ["".join(column) for column in pieces.T] == plain.text
