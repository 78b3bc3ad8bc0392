"""Laws of `generate` that hold for every way to draft, over the models of `language_models.py`."""

from __future__ import annotations

from typing import Any

import language_models

import specjax
from specjax.generation.run import TextStream

NEW = 40
PROMPTS = ["the cat", "on", "a hat, a dog and a rat of"]


def generate(target: specjax.LanguageModel, prompts: Any, **options: Any) -> Any:
    """`specjax.generate` without the measurements of the default, which `test_adaptive.py` has."""
    options.setdefault("proposer", "draft" if "draft" in options else "none")
    return specjax.generate(target, prompts, **options)


def drain(stream: Any) -> list[Any]:
    assert isinstance(stream, TextStream) and stream.output is None
    return list(stream)


def check_rows_alone(temperature: float, **speculation: Any) -> None:
    """A ragged batch gives each prompt the text that it gets alone with the same seed."""
    target = language_models.target()
    options = {"max_new_tokens": NEW, "temperature": temperature, **speculation}
    together = generate(target, PROMPTS, seed=[3, 1, 2], **options)
    for row, (prompt, seed) in enumerate(zip(PROMPTS, [3, 1, 2], strict=True)):
        alone = generate(target, prompt, seed=[seed], **options)
        assert (alone.tokens[0], alone.text[0], alone.finish[0]) == (
            together.tokens[row],
            together.text[row],
            together.finish[row],
        )
        assert len(set(alone.tokens[0])) > 8, "too monotonous to prove anything"


def check_stop(**speculation: Any) -> None:
    """Stopping cuts the text that would have been written."""
    target = language_models.target()
    options = {"max_new_tokens": NEW, "temperature": 1.0, **speculation}
    whole = generate(target, PROMPTS, **options)
    stop = whole.text[0][len(whole.text[0]) // 2]
    out = generate(target, PROMPTS, stop=stop, **options)
    assert out.text == [text.split(stop)[0] for text in whole.text]
    assert out.finish == [
        "stop" if stop in text else f for text, f in zip(whole.text, whole.finish, strict=True)
    ]


def check_stream(**speculation: Any) -> None:
    """The pieces of a list are lists with a string per row, and make up the texts of a plain
    call."""
    target = language_models.target()
    options = {"max_new_tokens": NEW, "temperature": 1.0, **speculation}
    stream = generate(target, PROMPTS, stream=True, **options)
    pieces = drain(stream)
    assert all(len(piece) == 3 for piece in pieces)
    whole = generate(target, PROMPTS, **options)
    assert ["".join(row) for row in zip(*pieces, strict=True)] == stream.output.text == whole.text
    assert (stream.output.tokens, stream.output.finish) == (whole.tokens, whole.finish)


def check_stats(rule: specjax.contract.Rule, **speculation: Any) -> None:
    """Tokens are counted, tau is tokens per pass, and alpha is a rate, but only if something was
    drafted."""
    target = language_models.target()
    out = generate(target, PROMPTS, max_new_tokens=NEW, temperature=1.0, rule=rule, **speculation)
    stats = out.stats
    assert stats.tokens == sum(map(len, out.tokens))
    assert stats.mean_accepted_length == stats.tokens / stats.target_passes
    assert stats.seconds > 0 and stats.tokens_per_second == stats.tokens / stats.seconds
    if speculation["proposer"] != "none":
        assert 0 <= stats.acceptance_rate <= 1
        assert stats.target_passes <= stats.tokens
    else:
        assert stats.acceptance_rate is None
        assert stats.target_passes == stats.tokens
