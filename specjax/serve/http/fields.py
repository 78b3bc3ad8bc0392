"""The bodies of requests, as OpenAI's API and LoRAX's name their fields."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

Whole = Annotated[int, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]


class Body(BaseModel):
    """The base of all bodies.  It refuses unknown fields, which would be ignored silently."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    refused: ClassVar[dict[str, str]] = {}
    """Fields of the API that this server does not honour, and what to do instead."""

    done: ClassVar[dict[str, object]] = {}
    """Values of refused fields that ask for what this server does anyway.  Of other refused fields
    those are accepted that switch something off."""

    ignored: ClassVar[tuple[str, ...]] = ()
    """Fields of the API that do not change the answer."""

    def called(self) -> dict[str, str]:
        """Returns the client's names of the fields of `specjax.Request`, where the names differ."""
        return {}


class Speculation(Body):
    """The drafting of a request; the text is the same with every choice."""

    drafter: Text | None = None
    num_speculative_tokens: Whole | None = None
    adapter: Text | None = None
    expected_token_ids: list[list[Whole]] | None = None  # of each text; they are drafts


class Resume(Body):
    """The tokens of each text that the client has; the stream goes on after them."""

    token_ids: list[list[Whole]]
    fast: Flag = False  # read them with the prompt, and compare nothing


class StreamOptions(Body):
    include_usage: Flag = False
    continuous_usage_stats: Flag = False


class Sampled(Body):
    """The fields that completions and chats share."""

    ignored: ClassVar[tuple[str, ...]] = (
        "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
        "parallel_tool_calls",
    )  # fmt: skip
    done: ClassVar[dict[str, object]] = {
        "skip_special_tokens": True, "tool_choice": "none", "function_call": "none", "best_of": 1,
        "modalities": ["text"],
    }  # fmt: skip
    refused: ClassVar[dict[str, str]] = {
        "tools": "send messages to /v1/chat/completions",
        "tool_choice": "send messages to /v1/chat/completions",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "best_of": "use n",
        "suffix": "the models of this server only continue a text",
        "echo": "put the prompt before the answer yourself",
        "use_beam_search": "sample, or pass temperature 0",
        "audio": "this server writes text",
        "modalities": "this server writes text",
        "prediction": "drafts come from the drafters of the server",
        "reasoning_effort": "pass chat_template_kwargs",
        "skip_special_tokens": "texts have no special tokens, whose ids return_guesses shows",
    }

    model: Text | None = None
    max_tokens: Whole | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None
    min_p: Number | None = None
    n: Annotated[int, Field(strict=True, ge=1)] = 1
    seed: Whole | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[Whole] | None = None
    ignore_eos: Flag = False
    min_tokens: Whole = 0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    stream: Flag = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, object] | None = None
    speculation: Speculation = Speculation()
    cache_salt: Text | None = None
    resume: Resume | None = None
    return_guesses: Flag = False  # who guessed each token: see docs/serving.md

    def called(self) -> dict[str, str]:
        return {
            "max_new_tokens": "max_tokens",
            "min_new_tokens": "min_tokens",
            "num_drafts": "speculation.num_speculative_tokens",
            "proposer": "speculation.drafter",
            "adapter": "speculation.adapter",
            "eos": "stop_token_ids",
            "constraint": "response_format",
            "resume": "resume.token_ids",
        }


class Completion(Sampled):
    ignored: ClassVar[tuple[str, ...]] = (*Sampled.ignored, "add_generation_prompt")

    prompt: Text | list[Text] | list[Whole] | list[list[Whole]]
    logprobs: Whole | None = None


class Chat(Sampled):
    ignored: ClassVar[tuple[str, ...]] = tuple(
        name for name in Sampled.ignored if name != "parallel_tool_calls"
    )
    refused: ClassVar[dict[str, str]] = {
        name: cure for name, cure in Sampled.refused.items() if not name.startswith("tool")
    }

    messages: list[dict[str, object]]
    max_completion_tokens: Whole | None = None
    logprobs: Flag = False
    top_logprobs: Whole | None = None
    add_generation_prompt: Flag = True
    chat_template_kwargs: dict[str, object] | None = None
    tools: list[dict[str, object]] | None = None
    tool_choice: Text | dict[str, object] | None = None
    parallel_tool_calls: Flag = True

    def called(self) -> dict[str, str]:
        newer = self.max_completion_tokens is not None or self.max_tokens is None
        most = "max_completion_tokens" if newer else "max_tokens"
        calls = bool(self.tools) and self.response_format is None
        return {
            **super().called(),
            "max_new_tokens": most,
            "logprobs": "top_logprobs",
            "constraint": "tool_choice" if calls else "response_format",
        }


class Tokenize(Body):
    model: Text | None = None
    prompt: Text | None = None
    messages: list[dict[str, object]] | None = None
    add_special_tokens: Flag = True
    add_generation_prompt: Flag = True
    return_token_strs: Flag = False


class LoraxParameters(Body):
    ignored: ClassVar[tuple[str, ...]] = ("adapter_source", "api_token")
    refused: ClassVar[dict[str, str]] = {
        "merged_adapters": "merge the adapters before the server starts",
        "decoder_input_details": "ask /tokenize for the tokens of a prompt",
        "typical_p": "use top_p or min_p",
        "best_of": "send the request several times with other seeds",
        "watermark": "this server writes no watermark",
        "return_k_alternatives": "use logprobs of /v1/completions",
        "truncate": "shorten the prompt yourself",
    }
    done: ClassVar[dict[str, object]] = {"typical_p": 1.0, "best_of": 1}

    adapter_id: Text | None = None
    max_new_tokens: Whole | None = None
    ignore_eos_token: Flag = False
    repetition_penalty: Number | None = None
    return_full_text: Flag = False
    stop: list[Text] = []
    seed: Whole | None = None
    temperature: Number | None = None
    top_k: Whole | None = None
    top_p: Number | None = None
    details: Flag = False
    response_format: dict[str, object] | None = None
    do_sample: Flag = False


class Lorax(Body):
    inputs: Text
    parameters: LoraxParameters = LoraxParameters()
    stream: Flag = False

    def called(self) -> dict[str, str]:
        return {"adapter": "adapter_id", "constraint": "response_format"}
