"""The options of sampling: the settings, the penalties and the ends of a `Request`."""

from __future__ import annotations

import dataclasses
from typing import TypedDict

from specjax.generation import Options as Keywords
from specjax.generation import Request
from specjax.models import LanguageModel
from specjax.options.fields import Options, option

_OWN = "; default: as in the target's generation_config.json if that samples, else "


class Sampled(TypedDict):
    """The keywords of `specjax.generate` and of `specjax.audit`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_new_tokens: int
    seed: int


@dataclasses.dataclass(frozen=True)
class FilterOptions(Options):
    """The sampling settings without the temperature, of which some commands take several."""

    group = "sampling"

    max_new_tokens: int = option(Request.max_new_tokens, "limit per prompt, in tokens")
    top_k: int | None = option(None, f"0 keeps all tokens{_OWN}0")
    top_p: float | None = option(None, f"1 keeps all tokens{_OWN}1")
    min_p: float | None = option(None, f"0 keeps all tokens{_OWN}0")
    seed: int = option(
        Request.seed,
        "random seed; with --rule match the text depends on the seed and not on the draft",
    )

    def sampled(self, target: LanguageModel, temperature: float | None) -> Sampled:
        """Returns the settings for `specjax.generate`, with the target's own as defaults."""
        own = target.settings(
            temperature=temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )
        return {
            "temperature": own["temperature"],
            "top_k": own["top_k"],
            "top_p": own["top_p"],
            "min_p": own["min_p"],
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
        }


@dataclasses.dataclass(frozen=True)
class SamplingOptions(FilterOptions):
    """The sampling settings."""

    temperature: float | None = option(None, f"0 is greedy{_OWN}0")


@dataclasses.dataclass(frozen=True)
class ProcessorOptions(Options):
    """Penalties, biases and ends."""

    group = "penalty"

    repetition_penalty: float | None = option(
        None, "penalty for tokens in the prompt or the output; 1 is off; default: the target's own"
    )
    presence_penalty: float = option(
        Request.presence_penalty, "penalty for tokens in the output; 0 is off"
    )
    frequency_penalty: float = option(
        Request.frequency_penalty, "penalty for each occurrence of a token in the output; 0 is off"
    )
    logit_bias: tuple[str, ...] = option(
        (), "add X to the logit of token ID; repeat the option for more", metavar="ID=X",
        repeated=True,
    )  # fmt: skip
    bad_word: tuple[str, ...] = option(
        (), "text that is never generated; repeat the option for more", metavar="TEXT",
        repeated=True,
    )  # fmt: skip
    min_new_tokens: int = option(Request.min_new_tokens, "no EOS before this many tokens")
    stop: tuple[str, ...] = option(
        (), "end the output before this text; repeat the option for more", metavar="TEXT",
        repeated=True,
    )  # fmt: skip

    def processing(self, target: LanguageModel) -> Keywords:
        """Returns these settings for `specjax.generate`."""
        penalty = target.settings(repetition_penalty=self.repetition_penalty)["repetition_penalty"]
        return {
            "repetition_penalty": penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": dict(map(_bias, self.logit_bias)),
            "bad_words": self.bad_word,
            "min_new_tokens": self.min_new_tokens,
            "stop": self.stop,
        }


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise ValueError(
            f"--logit-bias {text}; it must look like 42=-1.5, a token id and a number"
        ) from None
