"""What several commands ask for: models, proposers, prompts, sampling settings."""

from __future__ import annotations

import argparse
import inspect
import json
import pathlib
from typing import Any

import specjax
from specjax.commands.progress import progress
from specjax.sharding import RULES, make_mesh, parse_mesh
from specjax.types import Proposer

_RULE_OPTIONS = {
    option: (parameter.default, name)
    for name, kind in specjax.RULES.items()
    for option, parameter in inspect.signature(kind).parameters.items()
}
"""The numbers that rules take: name -> default and rule."""

_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_DRAFTED = ("draft", "tree", "dynamic-tree", "first-of")
_SHIPPED = pathlib.Path(specjax.__file__).parent.parent / "checkpoints" / "pycode"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="*", help="one prompt or several")
    parser.add_argument("--prompt-file", help="a text file (one prompt), or JSON lines with a field `prompt`")
    parser.add_argument(
        "--target", help="folder of the target, or org/name on the Hub; without it, the one that ships with a checkout"
    )
    parser.add_argument("--draft", help="of the draft, likewise; without it, the one beside the shipped target")
    parser.add_argument("--adapter", help="folder of Medusa heads that were trained for the target")
    parser.add_argument("--dtype", default="float32", help="of both models: float32, bfloat16 or float16")
    parser.add_argument(
        "--mesh", type=_mesh, metavar="data=N,model=M", help="devices: rows are split by N, each layer by M; else one"
    )
    parser.add_argument("--whole-draft", action="store_true", help="with --mesh: do not split the draft's layers")


def add_proposer_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--proposer",
        choices=sorted(set(specjax.PROPOSERS) - {"universal"}),  # which a draft of another tokenizer becomes by itself
        help="by default draft where there is one, else ngram",
    )
    parser.add_argument(
        "--num-drafts",
        "--num-speculative-tokens",
        type=int,
        default=4,
        help="guesses per target pass (gamma), or depth",
    )
    parser.add_argument("--branching", type=int, nargs="+", default=[3, 2, 1], help="tree: children a node, by level")
    parser.add_argument(
        "--width", type=int, default=4, help="dynamic-tree: nodes expanded a level, and children of each"
    )
    parser.add_argument("--num-nodes", type=int, default=16, help="dynamic-tree: nodes kept, the root included")
    parser.add_argument("--exit-layer", type=int, help="early-exit: layers of the target that guess; by default half")
    parser.add_argument(
        "--confidence-threshold", type=float, default=0.0, help="end a chain behind a guess less probable than this"
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rule", choices=sorted(specjax.RULES), default="match", help="which guesses are kept")
    for option, (default, name) in _RULE_OPTIONS.items():
        kind: dict[str, Any] = {"action": "store_true"} if default is False else {"type": type(default)}
        help_ = f"of --rule {name} (default: {default})"
        parser.add_argument(_flag(option), default=argparse.SUPPRESS, help=help_, **kind)
    parser.add_argument("--max-new-tokens", type=int, default=128, help="per prompt")
    own = "; without it, what the target's generation_config.json says, if it asks for sampling, or else "
    parser.add_argument("--temperature", type=float, help="0 is greedy" + own + "0")
    parser.add_argument("--top-k", type=int, help="0 keeps all tokens" + own + "0")
    parser.add_argument("--top-p", type=float, help="1 keeps all tokens" + own + "1")
    parser.add_argument("--min-p", type=float, help="0 keeps all tokens" + own + "0")
    parser.add_argument("--seed", type=int, default=0, help="with --rule match the text depends on it alone")


def add_processor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repetition-penalty", type=float, help="of prompt and output; 1: off; else the target's own")
    parser.add_argument("--presence-penalty", type=float, default=0.0, help="once for a token of the output; 0 is off")
    parser.add_argument("--frequency-penalty", type=float, default=0.0, help="for each time it stands there; 0 is off")
    parser.add_argument("--logit-bias", action="append", default=[], metavar="ID=X", help="added to a token's logit")
    parser.add_argument("--bad-word", action="append", default=[], metavar="TEXT", help="a text not to be written")
    parser.add_argument("--min-new-tokens", type=int, default=0, help="no end of text before so many")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="a text at which the output ends")


def sampling(arguments: argparse.Namespace, target: specjax.LanguageModel) -> dict[str, Any]:
    """The options of `specjax.generate` that plain and speculative decoding share."""
    given = vars(arguments)
    settings = target.settings(**{name: given.get(name) for name in _SETTINGS})
    options = {"max_new_tokens": arguments.max_new_tokens, "seed": arguments.seed, "rule": rule(arguments)}
    if "logit_bias" not in given:
        return {**options, **{name: settings[name] for name in _SETTINGS[:4]}}
    names = ("presence_penalty", "frequency_penalty", "min_new_tokens", "stop")
    options |= {"logit_bias": dict(map(_bias, arguments.logit_bias)), "bad_words": arguments.bad_word}
    return {**options, **settings, **{name: given[name] for name in names}}


def rule(arguments: argparse.Namespace) -> Any:
    """The rule, with those of its numbers that were given."""
    given = {name: value for name, value in vars(arguments).items() if name in _RULE_OPTIONS}
    for name in given:
        owner = _RULE_OPTIONS[name][1]
        if owner != arguments.rule:
            raise ValueError(
                f"{_flag(name)} is not used by --rule {arguments.rule}; leave it out, or use --rule {owner}"
            )
    return specjax.RULES[arguments.rule](**given)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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
        raise ValueError(f"--logit-bias {text}; it must look like 42=-1.5, a token id and a number") from None


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


def load_models(arguments: argparse.Namespace) -> tuple[specjax.LanguageModel, specjax.LanguageModel | None, str]:
    """The target, the draft where there is one to ask, and the kind of proposer."""
    target, draft, kind = arguments.target, arguments.draft, arguments.proposer
    if kind is None and arguments.adapter is not None:
        kind = "medusa"
    if target is None:
        target = _SHIPPED / "target"
        if not target.is_dir():
            raise FileNotFoundError(
                f"there is no shipped checkpoint at {target} (an installed package has none): "
                "pass --target with a Hugging Face folder, or org/name on the Hub"
            )
        if draft is None and kind in (None, *_DRAFTED):
            draft = _SHIPPED / "draft"
    if kind is None:
        kind = "draft" if draft is not None else "ngram"
    if kind in _DRAFTED and draft is None:
        raise ValueError(f"--proposer {kind} needs --draft with the folder of a smaller model; or use --proposer ngram")
    if kind not in _DRAFTED and arguments.draft is not None:
        raise ValueError(f"--draft is not used by --proposer {kind}; leave one of them out")
    if kind == "medusa" and arguments.adapter is None:
        raise ValueError("--proposer medusa needs --adapter with a folder of heads that were trained for this target")
    if kind != "medusa" and arguments.adapter is not None:
        raise ValueError(f"--adapter is not used by --proposer {kind}; leave one of them out")
    sizes, whole = (vars(arguments).get(name) for name in ("mesh", "whole_draft"))
    if whole and (not sizes or draft is None):
        raise ValueError("--whole-draft is used with --mesh and a draft; leave it out, or add them")
    mesh, rules = sizes and make_mesh(**sizes), {} if whole else RULES
    with progress("loading"):
        loaded = specjax.load(target, arguments.dtype, mesh=mesh)
        return loaded, None if draft is None else specjax.load(draft, arguments.dtype, mesh=mesh, rules=rules), kind


def make_proposer(
    arguments: argparse.Namespace, kind: str, target: specjax.LanguageModel, draft: Any
) -> Proposer | specjax.MedusaAdapter | None:
    """The proposer of that kind, from what `add_proposer_arguments` asked; None leaves the draft to `generate`."""
    gamma, threshold, size = arguments.num_drafts, arguments.confidence_threshold, target.model.vocab_size
    if kind == "draft" and threshold == 0:
        return None
    if kind == "none":
        return specjax.NoProposer()
    if kind == "ngram":
        return specjax.NGram(gamma)
    if kind == "tree":
        return specjax.DraftTree(draft.model, size, tuple(arguments.branching))
    if kind == "dynamic-tree":
        return specjax.DynamicTree(draft.model, size, gamma, arguments.width, arguments.num_nodes)
    if kind == "medusa":
        return specjax.load_medusa(arguments.adapter, target)
    if kind == "early-exit":
        layers = target.model.module.config.num_layers
        return specjax.EarlyExit(target.model, arguments.exit_layer or max(layers // 2, 1), gamma, threshold)
    chain = specjax.DraftModel(draft.model, size, gamma, threshold)
    return specjax.FirstOf(specjax.NGram(gamma), chain) if kind == "first-of" else chain
