"""Options that several commands share: models, proposers, prompts, sampling settings."""

from __future__ import annotations

import argparse
import pathlib
from typing import TypedDict

import specjax
from specjax.flags.speculation import (
    KINDS,
    add_numbers_of_proposers,
    add_numbers_of_rules,
    numbers_given,
)
from specjax.generation import Options, read_file
from specjax.parallel import add_process_arguments, parse_mesh

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def add_prompt_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds the prompts, for `read_prompts`; returns their group."""
    group = parser.add_argument_group("prompts")
    group.add_argument("prompt", nargs="*", help="one or several prompts")
    group.add_argument(
        "--prompt-file", help="a text file (one prompt), or JSON lines with a field `prompt`"
    )
    return group


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `load_models` reads, except for the devices."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target",
        help="folder of the target, or org/name on the Hub; default: the shipped target",
    )
    group.add_argument(
        "--draft",
        help="folder of the draft, or org/name on the Hub; default: the shipped draft, with the "
        "shipped target",
    )
    group.add_argument(
        "--drafter",
        "--adapter",
        help="folder of a drafter that was trained for the target (Medusa, EAGLE-3, DFlash, ...), "
        "of a datastore, "
        "or org/name on the Hub; default: the shipped one, with the shipped target",
    )
    group.add_argument(
        "--dtype",
        help="float32, bfloat16 or float16; default: float32 on a CPU, else bfloat16",
    )


def add_device_arguments(
    parser: argparse.ArgumentParser, *, draft_mesh: bool = False, processes: bool = False
) -> None:
    """Adds the mesh, and on request the draft's own mesh and the options of `join_from`."""
    title = "devices and processes" if processes else "devices"
    group = parser.add_argument_group(title)
    group.add_argument(
        "--mesh",
        type=_mesh,
        metavar="data=N,model=M",
        help="device mesh: rows are sharded over N and each layer over M, on the first N x M "
        "devices; default: one device",
    )
    group.add_argument(
        "--whole-draft", action="store_true", help="with --mesh: do not shard the draft's layers"
    )
    if draft_mesh:
        group.add_argument(
            "--draft-mesh",
            type=_mesh,
            metavar="data=N,model=M",
            help="devices of the draft alone, after those of --mesh: it drafts while the target "
            "verifies",
        )
    if processes:
        add_process_arguments(group)


def add_proposer_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--proposer` and the numbers of proposers."""
    group = parser.add_argument_group("speculation: what drafts")
    group.add_argument(
        "--proposer", type=_kind, metavar="NAME",
        help=f"{', '.join(KINDS)}, or module:Name for your own; default: drafter with --drafter; "
        "auto with --rule match and no numbers of a proposer; else draft if there is one, or ngram",
    )  # fmt: skip
    add_numbers_of_proposers(group)


def add_rule_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--rule` and the numbers of rules."""
    group = parser.add_argument_group("speculation: which drafts are accepted")
    group.add_argument(
        "--rule",
        choices=sorted(specjax.RULES),
        default="match",
        help="rule that accepts or rejects draft tokens",
    )
    add_numbers_of_rules(group)


def add_sampling_arguments(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Adds the sampling settings.  With `several`, `--temperature` takes more than one value."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-new-tokens", type=int, default=128, help="limit per prompt")
    own = "; default: as in the target's generation_config.json if that samples, else "
    words = "0 is greedy" + own + "0"
    if several:
        group.add_argument(
            "--temperature", "--temperatures", type=float, nargs="+", default=[None], help=words
        )
    else:
        group.add_argument("--temperature", type=float, help=words)
    group.add_argument("--top-k", type=int, help="0 keeps all tokens" + own + "0")
    group.add_argument("--top-p", type=float, help="1 keeps all tokens" + own + "1")
    group.add_argument("--min-p", type=float, help="0 keeps all tokens" + own + "0")
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        help="random seed; with --rule match the text depends on the seed and not on the draft",
    )


def add_processor_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds penalties, biases and ends, for `processing`."""
    group = parser.add_argument_group("penalties, biases and ends")
    group.add_argument(
        "--repetition-penalty",
        type=float,
        help="penalty for tokens in the prompt or the output; 1 is off; default: the target's own",
    )
    group.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        help="penalty for tokens in the output; 0 is off",
    )
    group.add_argument(
        "--frequency-penalty",
        type=float,
        default=0.0,
        help="penalty for each occurrence of a token in the output; 0 is off",
    )
    group.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        metavar="ID=X",
        help="add X to the logit of token ID; repeat the option for more",
    )
    group.add_argument(
        "--bad-word",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that is never generated; repeat the option for more",
    )
    group.add_argument(
        "--min-new-tokens", type=int, default=0, help="no EOS before this many tokens"
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the output before this text; repeat the option for more",
    )


class SamplingOptions(TypedDict):
    """The keywords of `specjax.generate` and of `specjax.audit`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_new_tokens: int
    seed: int


def sampling(arguments: argparse.Namespace, target: specjax.LanguageModel) -> SamplingOptions:
    """Returns the options of `add_sampling_arguments`, for `specjax.generate`."""
    settings = target.settings(**{name: getattr(arguments, name) for name in _SAMPLING})
    return {
        "temperature": settings["temperature"],
        "top_k": settings["top_k"],
        "top_p": settings["top_p"],
        "min_p": settings["min_p"],
        "max_new_tokens": arguments.max_new_tokens,
        "seed": arguments.seed,
    }


def processing(arguments: argparse.Namespace, target: specjax.LanguageModel) -> Options:
    """Returns the options of `add_processor_arguments`, for `specjax.generate`."""
    penalty = target.settings(repetition_penalty=arguments.repetition_penalty)["repetition_penalty"]
    return {
        "repetition_penalty": penalty,
        "presence_penalty": arguments.presence_penalty,
        "frequency_penalty": arguments.frequency_penalty,
        "logit_bias": dict(map(_bias, arguments.logit_bias)),
        "bad_words": arguments.bad_word,
        "min_new_tokens": arguments.min_new_tokens,
        "stop": arguments.stop,
    }


def _kind(text: str) -> str:
    if text not in KINDS and ":" not in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither one of {', '.join(KINDS)} nor a module:Name of your own"
        )
    return text


def _mesh(text: str) -> dict[str, int]:
    try:
        return parse_mesh(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise ValueError(
            f"--logit-bias {text}; it must look like 42=-1.5, a token id and a number"
        ) from None


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """Returns the prompts on the command line or in `--prompt-file`.

    Raises:
      ValueError, OSError: both or neither were given, or as `specjax.generation.prompts.read_file`.
    """
    if bool(arguments.prompt) == bool(arguments.prompt_file):
        raise ValueError(
            'pass either a prompt, such as "def fibonacci(n):", or --prompt-file, not both'
        )
    if not arguments.prompt_file:
        return arguments.prompt
    prompts = read_file(pathlib.Path(arguments.prompt_file))
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise ValueError(
            f"{arguments.prompt_file} holds conversations; this command takes texts: lines like "
            '{"prompt": "..."}'
        )
    return texts


def choose(arguments: argparse.Namespace, rule: str | None = None) -> str:
    """Returns the kind of proposer: `--proposer`, or a default that fits the folders.

    With a rule under which no text depends on the drafts the default is "auto", unless numbers of
    a proposer were given.  None is for jobs that measure drafts.
    """
    if arguments.proposer is not None:
        return arguments.proposer
    if arguments.drafter is not None:
        return "drafter"
    if vars(arguments).get("draft_mesh"):
        return "draft"
    if rule is not None and specjax.RULES[rule].fixes_text() and not numbers_given(arguments):
        return "auto"
    return "draft" if arguments.draft is not None or arguments.target is None else "ngram"
