"""The bodies of answers: OpenAI's completions and chats, LoRAX's, and figures of speculation."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence

import numpy as np

from specjax.serve.handle import Guess, Increment, Served
from specjax.serve.http import tools
from specjax.serve.http.requests import Asked
from specjax.text import Words
from specjax.types import Json

REASONS = {"eos": "stop", "stop": "stop", "limit": "length", "cancelled": "abort"}
_LORAX_REASONS = {"eos": "eos_token", "stop": "stop_sequence", "limit": "length"}


def speculation(served: Sequence[Served], most: int) -> dict[str, Json]:
    """Returns the figures of a request, under the names that vLLM gives them.

    Args:
      served: its texts.
      most: the drafts of a step are at most this deep.
    """
    steps = [step for one in served for step in one.steps if step.offered]
    offered, accepted = sum(step.offered for step in steps), sum(step.accepted for step in steps)
    histogram = np.bincount([step.accepted for step in steps], minlength=most + 1).tolist()
    written = sum(step.written for step in steps)
    return {
        "mean_acceptance_length": written / len(steps) if steps else None,
        "draft_acceptance_rate": accepted / offered if offered else None,
        "acceptance_histogram": histogram,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": offered,
        "num_spec_steps": len(steps),
        "num_spec_tokens": most,
        "per_step_accepted": [step.accepted for step in steps],
        "per_step_drafted": [step.offered for step in steps],
    }


def usage(prompt: int, completion: int, copied: int) -> dict[str, Json]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": copied},
    }


def usage_of(served: Sequence[Served], n: int) -> dict[str, Json]:
    """Returns the usage of all texts of a request; a prompt of `n` texts counts once."""
    prompts = served[::n]
    return usage(
        sum(one.prompt for one in prompts),
        sum(len(one.tokens) for one in served),
        sum(one.copied for one in prompts),
    )


@dataclasses.dataclass(frozen=True)
class Writer:
    """Writes the answers to one request.

    Attributes:
      chat: in the form of chats, not of completions.
      most: the drafts of a step are at most this deep.
    """

    words: Words
    asked: Asked
    chat: bool
    most: int
    wants_guesses: bool
    model_hash: str = ""
    id: str = ""
    created: int = 0

    @classmethod
    def of(
        cls, words: Words, asked: Asked, chat: bool, most: int, guesses: bool, model_hash: str,
        request_id: str,
    ) -> Writer:  # fmt: skip
        name = f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"
        return cls(words, asked, chat, most, guesses, model_hash, name, int(time.time()))

    def whole(self, served: Sequence[Served]) -> dict[str, Json]:
        """Returns the answer of a request that does not stream."""
        choices = []
        for index, one in enumerate(served):
            text, calls = self.read(one)
            choice: dict[str, Json] = {"index": index, "finish_reason": _reason(one, calls)}
            if self.chat:
                message: dict[str, Json] = {"role": "assistant", "content": text}
                if calls:
                    message |= {"content": text or None, "tool_calls": tools.written(calls)}
                choice["message"] = message
            else:
                choice["text"] = text
            choice["logprobs"] = self._logprobs(one, 0)
            choice["token_ids"] = one.tokens
            if self.wants_guesses:
                choice["guesses"] = list(map(_guess, one.guesses))
            choices.append(choice)
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            **self._head(kind),
            "choices": choices,
            "usage": usage_of(served, self.asked.n),
            **self.figures(served),
        }

    def first(self, index: int) -> dict[str, Json] | None:
        """Returns the chunk that opens a text, or None."""
        if not self.chat:
            return None
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": index, "delta": delta, "finish_reason": None})

    def read(self, served: Served) -> tuple[str, list[tools.Call]]:
        """Returns a text without its calls of tools, and the calls."""
        known = self.asked.tools
        return (served.text, []) if known is None else known.read(served.text)

    def settled(self, text: str) -> int:
        """Returns how many characters of a growing text are no call of a tool."""
        known = self.asked.tools
        return len(text) if known is None else known.form.settled(text)

    def increment(self, index: int, new: Increment, shown: str) -> dict[str, Json]:
        """Returns a chunk with new tokens, of which `shown` is the text that is no call."""
        choice: dict[str, Json] = {"index": index, "finish_reason": None}
        if self.chat:
            choice["delta"] = {"content": shown}
        else:
            choice["text"] = shown
        choice["token_ids"] = new.tokens
        if new.logprobs is not None:
            choice["logprobs"] = self._logprobs(new, new.offset)
        if self.wants_guesses:
            choice["guesses"] = list(map(_guess, new.guesses))
            choice["pieces"] = new.pieces
        return self._chunk(choice)

    def last(self, index: int, served: Served, sent: int) -> list[dict[str, Json]]:
        """Returns the chunks that end a text: what is left of it, its calls, and the reason.

        Args:
          sent: the characters of the text that were shown before.
        """
        text, calls = self.read(served)
        deltas: list[dict[str, Json]] = [{"content": text[sent:]}] if text[sent:] else []
        for number, call in enumerate(tools.written(calls)):
            deltas.append({"tool_calls": [{"index": number, **call}]})
        choices: list[dict[str, Json]] = []
        for delta in deltas if self.chat else ():
            choices.append({"index": index, "delta": delta, "finish_reason": None})
        end: dict[str, Json] = {"index": index, "finish_reason": _reason(served, calls)}
        choices.append(end | ({"delta": {}} if self.chat else {"text": ""}))
        return list(map(self._chunk, choices))

    def end(self, served: Sequence[Served]) -> dict[str, Json]:
        """Returns the chunk after all texts, with their usage."""
        usage = {"usage": usage_of(served, self.asked.n)}
        return {**self._chunk(None), **self.figures(served), **usage}

    def figures(self, served: Sequence[Served]) -> dict[str, Json]:
        """Returns figures of the drafts, and the seed."""
        drafted = speculation(served, self.most)
        return {"metrics": {"speculative_decoding": drafted, "seed": self.asked.seed}}

    def _head(self, kind: str) -> dict[str, Json]:
        head = {"id": self.id, "object": kind, "created": self.created}
        return {**head, "model": self.asked.model, "system_fingerprint": self.model_hash}

    def _chunk(self, choice: dict[str, Json] | None) -> dict[str, Json]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [] if choice is None else [choice]}

    def _logprobs(self, made: Increment | Served, offset: int) -> dict[str, Json] | None:
        """Returns the log-probabilities of tokens whose text begins at a given character."""
        if made.logprobs is None:
            return None
        words = texts_of(self.words, made)
        raw = [float(x) for x in made.logprobs.raw[: len(words)]]
        # The token that was chosen is called the same among the most probable ones.
        top = [
            [(t, word if t == token else self.words.name(t), float(x))
             for t, x in zip(ids.tolist(), values, strict=True)]
            for token, word, ids, values in zip(
                made.tokens, words, made.logprobs.top_ids, made.logprobs.top, strict=True
            )
        ]  # fmt: skip
        if not self.chat:
            starts = itertools.accumulate(map(len, made.pieces), initial=offset)
            # Of two tokens with one name, the more probable one, which comes first.
            best = [{name: x for _, name, x in reversed(some)} for some in top]
            return {
                "tokens": words, "token_logprobs": raw, "top_logprobs": best,
                "text_offset": list(starts)[:-1],
            }  # fmt: skip
        content = [
            {**self._entry(token, word, x), "top_logprobs": [self._entry(*entry) for entry in some]}
            for token, word, x, some in zip(made.tokens, words, raw, top, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, word: str, logprob: float) -> dict[str, Json]:
        written = self.words.bytes_of(token)
        return {
            "token": word, "logprob": logprob, "bytes": None if written is None else list(written)
        }  # fmt: skip


def _reason(served: Served, calls: Sequence[tools.Call]) -> str:
    """Returns why a text has ended."""
    reason = REASONS[served.finish]
    return "tool_calls" if calls and reason == "stop" else reason


def texts_of(words: Words, made: Increment | Served) -> list[str]:
    """Returns the piece of text of each token, or the name of a special token.

    Without special tokens they join to the text.  A character of several tokens belongs to the
    last of them.  Without a tokenizer there are only names.
    """
    return [
        piece if words.writes(token) else words.name(token)
        for token, piece in zip(made.tokens, made.pieces, strict=True)
    ]


def lorax_whole(
    words: Words, served: Served, prompt: str | None, seed: int, details: bool
) -> dict[str, Json]:
    """Returns LoRAX's answer; `prompt` is put before the text if it is not None."""
    answer: dict[str, Json] = {"generated_text": (prompt or "") + served.text}
    if details:
        answer["details"] = {
            **_lorax_details(served, seed),
            "skipped_tokens": sum(guess.depth > 0 for guess in served.guesses),
            "prefill": [],
            "tokens": lorax_tokens(words, served),
        }
    return answer


def lorax_tokens(words: Words, made: Increment | Served) -> list[dict[str, Json]]:
    """Returns LoRAX's tokens; an accepted draft is `skipped`, as it needed no pass of its own."""
    raw = [None] * len(made.tokens) if made.logprobs is None else map(float, made.logprobs.raw)
    return [
        {
            "id": token,
            "text": text,
            "logprob": x,
            "special": words.is_special(token),
            "skipped": guess.depth > 0,
        }
        for token, text, guess, x in zip(
            made.tokens, texts_of(words, made), made.guesses, raw, strict=False
        )
    ]


def lorax_end(served: Served, prompt: str | None, seed: int) -> dict[str, Json]:
    """Returns the last two fields of a stream."""
    text = (prompt or "") + served.text
    return {"generated_text": text, "details": _lorax_details(served, seed)}


def _lorax_details(served: Served, seed: int) -> dict[str, Json]:
    return {
        "finish_reason": _LORAX_REASONS.get(served.finish, "length"),
        "prompt_tokens": served.prompt,
        "generated_tokens": len(served.tokens),
        "seed": seed,
    }


def _guess(guess: Guess) -> list[Json]:
    return [guess.depth, guess.drafter, guess.offered]
