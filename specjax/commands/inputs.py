"""What several commands ask for: models, prompts, sampling settings."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import specjax
from specjax.commands.progress import progress

_SHIPPED = pathlib.Path(specjax.__file__).parent.parent / "checkpoints" / "pycode"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="*", help="one prompt or several")
    parser.add_argument("--prompt-file", help="a text file (one prompt), or JSON lines with a field `prompt`")
    parser.add_argument("--target", help="folder of the target; without it, the checkpoint that ships with a checkout")
    parser.add_argument("--draft", help="folder of the draft; without it, the one beside the shipped target")
    parser.add_argument("--dtype", default="float32", help="of both models: float32, bfloat16 or float16")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rule", choices=sorted(specjax.RULES), default="match", help="which guesses are kept")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="per prompt")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="0 keeps all tokens")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 keeps all tokens")
    parser.add_argument("--min-p", type=float, default=0.0, help="0 keeps all tokens")
    parser.add_argument("--seed", type=int, default=0, help="with --rule match the text depends on it alone")


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of `specjax.generate` that plain and speculative decoding share."""
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    return {**{name: getattr(arguments, name) for name in names}, "rule": specjax.RULES[arguments.rule]()}


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    if bool(arguments.prompt) == bool(arguments.prompt_file):
        raise ValueError('pass a prompt, such as "def fibonacci(n):", or --prompt-file, and not both')
    if not arguments.prompt_file:
        return arguments.prompt
    path = pathlib.Path(arguments.prompt_file)
    if not path.is_file():
        raise FileNotFoundError(f"--prompt-file {path} does not exist")
    text = path.read_text()
    if path.suffix != ".jsonl":
        return [text]
    try:
        return [json.loads(line)["prompt"] for line in text.splitlines() if line.strip()]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f'{path}: every line must be an object like {{"prompt": "..."}} ({error!r})') from None


def load_models(arguments: argparse.Namespace, num_drafts: int) -> tuple[specjax.LanguageModel, Any, Any]:
    """The target, and either a draft or a proposer."""
    target, draft, kind = arguments.target, arguments.draft, arguments.proposer
    if target is None:
        target = _SHIPPED / "target"
        if not target.is_dir():
            raise FileNotFoundError(
                f"there is no shipped checkpoint at {target} (an installed package has none): "
                "pass --target with a Hugging Face folder"
            )
        if draft is None and kind in (None, "draft"):
            draft = _SHIPPED / "draft"
    if kind is None:
        kind = "draft" if draft is not None else "ngram"
    if kind == "draft" and draft is None:
        raise ValueError("--proposer draft needs --draft with the folder of a smaller model; or use --proposer ngram")
    if kind != "draft" and arguments.draft is not None:
        raise ValueError(f"--draft is not used by --proposer {kind}; leave one of them out")
    with progress("loading"):
        loaded = specjax.load(target, arguments.dtype)
        if kind == "draft" and draft is not None:
            return loaded, specjax.load(draft, arguments.dtype), None
    return loaded, None, specjax.NGram(num_drafts) if kind == "ngram" else specjax.NoProposer()
