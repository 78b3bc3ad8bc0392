"""What the HTTP door does without an engine: nulls, values that ask for nothing, names, figures."""

from __future__ import annotations

import json
import types

import pytest

pytest.importorskip("pydantic")
from specjax.serve.handle import End, Handle
from specjax.serve.http.answers import speculation
from specjax.serve.http.fields import Chat, Completion, Lorax, Tokenize
from specjax.serve.http.problems import Problem, in_words_of, parse
from specjax.text import Texts

LEAST = {
    Completion: {"prompt": "x"}, Chat: {"messages": [{"role": "user", "content": "x"}]},
    Lorax: {"inputs": "x"}, Tokenize: {},
}  # fmt: skip


@pytest.mark.parametrize("kind", LEAST)
def test_null_is_the_default(kind):
    """Of every field that is not required, also inside of other objects, and of refused ones."""
    optional = [name for name, field in kind.model_fields.items() if not field.is_required()]
    sent = LEAST[kind] | dict.fromkeys([*optional, *kind.refused])
    assert parse(kind, json.dumps(sent).encode()) == parse(kind, json.dumps(LEAST[kind]).encode())
    inner = {name: field.annotation for name, field in kind.model_fields.items()
             if hasattr(field.annotation, "model_fields")}  # fmt: skip
    for name, body in inner.items():
        sent = LEAST[kind] | {name: dict.fromkeys([*body.model_fields, *body.refused])}
        assert parse(kind, json.dumps(sent).encode()) == kind(**LEAST[kind])
    for name in kind.model_fields.keys() - set(optional):
        with pytest.raises(Problem, match=f"{name}=None is not allowed"):
            parse(kind, json.dumps(LEAST[kind] | {name: None}).encode())


@pytest.mark.parametrize(
    "kind, name, accepted, refused",
    [
        (Completion, "tool_choice", ["none"], ["auto", "required", False]),
        (Chat, "function_call", ["none"], ["auto"]),
        (Completion, "tools", [[]], [[{}]]),
        (Chat, "modalities", [["text"]], [["text", "audio"], []]),
        (Completion, "skip_special_tokens", [True], [False, 1]),
        (Completion, "best_of", [1], [0, 2, True]),
        (Completion, "echo", [False], [True]),
        (Completion, "suffix", [""], ["x", 0]),
    ],
)
def test_values_that_ask_for_what_the_server_does(kind, name, accepted, refused):
    """They are accepted; any other value is refused by name, and so is the number 0."""
    for value in accepted:
        sent = LEAST[kind] | {name: value}
        assert parse(kind, json.dumps(sent).encode()) == kind(**LEAST[kind])
    for value in refused:
        with pytest.raises(Problem, match=f"^{name} is not supported: "):
            parse(kind, json.dumps(LEAST[kind] | {name: value}).encode())


@pytest.mark.parametrize(
    "body, message, wanted, field",
    [
        (Completion(prompt="x"), "max_new_tokens=0; pass max_new_tokens=4 or less",
         "max_tokens=0; pass max_tokens=4 or less", "max_tokens"),
        (Chat(messages=[], max_tokens=1), "max_new_tokens=0", "max_tokens=0", "max_tokens"),
        (Chat(messages=[]), "max_new_tokens=0", "max_completion_tokens=0", "max_completion_tokens"),
        (Chat(messages=[]), "logprobs=-1", "top_logprobs=-1", "top_logprobs"),
        (Completion(prompt="x"), "eos has 9 ids", "stop_token_ids has 9 ids", None),
        (Completion(prompt="x"), "pass adapter= with a", "pass speculation.adapter= with a", None),
        (Completion(prompt="x"), "num_drafts=9", "speculation.num_speculative_tokens=9",
         "speculation.num_speculative_tokens"),
        (Lorax(inputs="x"), "max_new_tokens=0", "max_new_tokens=0", "max_new_tokens"),
    ],
)  # fmt: skip
def test_errors_name_the_field_that_was_sent(body, message, wanted, field):
    problem = in_words_of(body, ValueError(message))
    assert (problem.message, problem.param, problem.status) == (wanted, field, 400)


def test_a_step_that_ends_with_a_draft_has_no_bonus_token():
    """Three steps with two drafts each: two of them accept one and add a token of the target's
    own, and the last one ends at its accepted draft. So 5 tokens in 3 steps."""
    texts = Texts(types.SimpleNamespace(tokenizer=None), [0], ())
    handle = Handle(texts, ("draft", None), 1, None)
    code = lambda depth: depth | 2 << 16  # noqa: E731
    # A code says that the last token of a step is the target's own.
    end = End(5, "", "limit", (3, 5, 3, 6, 6, 3))
    handle.extend([1, 2, 3, 4, 5], [code(1), code(0)] * 2 + [code(0)], 3, None, end)
    served = handle.result()
    assert [tuple(step) for step in served.steps] == [(2, 1, 2), (2, 1, 2), (2, 1, 1)]
    figures = speculation([served], 2)
    assert figures["mean_acceptance_length"] == pytest.approx(5 / 3)
    assert figures["num_accepted_draft_tokens"] == 3 and figures["num_spec_steps"] == 3
