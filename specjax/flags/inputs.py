"""Options that several commands share: models, proposers, prompts, sampling settings."""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import TypedDict

import jax
from jax.sharding import Mesh

import specjax
from specjax.flags.speculation import (
    DRAFTED,
    DRAFTERS,
    KINDS,
    add_numbers_of_proposers,
    add_numbers_of_rules,
    check_numbers,
    numbers_given,
)
from specjax.flags.waiting import progress
from specjax.parallel import RULES, Indivisible, Rules, make_mesh, parse_mesh
from specjax.prompts import read_file
from specjax.request import Options

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_CHECKOUT = pathlib.Path(specjax.__file__).parent.parent
_SHIPPED = _CHECKOUT / "checkpoints" / "pycode"

EXAMPLE = _CHECKOUT / "examples" / "prompt.txt"
"""A prompt for the shipped target."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="*", help="one or several prompts")
    parser.add_argument(
        "--prompt-file", help="a text file (one prompt), or JSON lines with a field `prompt`"
    )
    parser.add_argument(
        "--target",
        help="folder of the target, or org/name on the Hub; default: the shipped target",
    )
    parser.add_argument(
        "--draft",
        help="folder of the draft, or org/name on the Hub; default: the shipped draft, with the "
        "shipped target",
    )
    parser.add_argument(
        "--drafter",
        "--adapter",
        help="folder of a drafter that was trained for the target (Medusa, EAGLE-3, DFlash, ...), "
        "of a datastore, "
        "or org/name on the Hub; default: the shipped one, with the shipped target",
    )
    parser.add_argument(
        "--dtype",
        help="float32, bfloat16 or float16; default: float32 on a CPU, else bfloat16",
    )
    parser.add_argument(
        "--mesh",
        type=_mesh,
        metavar="data=N,model=M",
        help="device mesh: rows are sharded over N and each layer over M, on the first N x M "
        "devices; default: one device",
    )
    parser.add_argument(
        "--whole-draft", action="store_true", help="with --mesh: do not shard the draft's layers"
    )


def add_draft_mesh_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft-mesh",
        type=_mesh,
        metavar="data=N,model=M",
        help="devices of the draft alone, after those of --mesh: it drafts while the target "
        "verifies",
    )


def add_proposer_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--proposer", type=_kind, metavar="NAME",
        help=f"{', '.join(KINDS)}, or module:Name for your own; default: drafter with --drafter; "
        "auto with --rule match and no numbers of a proposer; else draft if there is one, or ngram",
    )  # fmt: skip
    add_numbers_of_proposers(parser)


def add_rule_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rule",
        choices=sorted(specjax.RULES),
        default="match",
        help="rule that accepts or rejects draft tokens",
    )
    add_numbers_of_rules(parser)


def add_sampling_arguments(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """With `several`, `--temperature` takes more than one value."""
    parser.add_argument("--max-new-tokens", type=int, default=128, help="limit per prompt")
    own = "; default: as in the target's generation_config.json if that samples, else "
    words = "0 is greedy" + own + "0"
    if several:
        parser.add_argument(
            "--temperature", "--temperatures", type=float, nargs="+", default=[None], help=words
        )
    else:
        parser.add_argument("--temperature", type=float, help=words)
    parser.add_argument("--top-k", type=int, help="0 keeps all tokens" + own + "0")
    parser.add_argument("--top-p", type=float, help="1 keeps all tokens" + own + "1")
    parser.add_argument("--min-p", type=float, help="0 keeps all tokens" + own + "0")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="random seed; with --rule match the text depends on the seed and not on the draft",
    )


def add_processor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        help="penalty for tokens in the prompt or the output; 1 is off; default: the target's own",
    )
    parser.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        help="penalty for tokens in the output; 0 is off",
    )
    parser.add_argument(
        "--frequency-penalty",
        type=float,
        default=0.0,
        help="penalty for each occurrence of a token in the output; 0 is off",
    )
    parser.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        metavar="ID=X",
        help="add X to the logit of token ID; repeat the option for more",
    )
    parser.add_argument(
        "--bad-word",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that is never generated; repeat the option for more",
    )
    parser.add_argument(
        "--min-new-tokens", type=int, default=0, help="no EOS before this many tokens"
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the output before this text; repeat the option for more",
    )


class SamplingOptions(TypedDict):
    """Keywords of `specjax.generate` and of `specjax.audit`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_new_tokens: int
    seed: int


def sampling(arguments: argparse.Namespace, target: specjax.LanguageModel) -> SamplingOptions:
    """The options of `add_sampling_arguments`, for `specjax.generate`."""
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
    """The options of `add_processor_arguments`, for `specjax.generate`."""
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
    """The prompts on the command line or in `--prompt-file`.

    Raises:
      ValueError, OSError: both or neither were given, or as `specjax.prompts.read_file`.
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
    """The kind of proposer: `--proposer`, or a default that fits the folders.

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


def load_models(
    arguments: argparse.Namespace, kinds: Sequence[str], rules: Sequence[str] = ()
) -> tuple[specjax.LanguageModel, specjax.LanguageModel | None]:
    """The target, and the draft if one of these kinds of proposers needs one.

    If there is no `--target`, this sets the missing folders in `arguments` to the shipped ones.
    `arguments.drafter_of_auto` is the `--drafter` that was given, or None.

    Raises:
      ValueError, FileNotFoundError: folders or options do not fit the proposers and rules; raised
        before anything is read.
    """
    check_numbers(arguments, kinds, rules)
    drafted, shipped = [kind for kind in kinds if kind in DRAFTED], arguments.target is None
    own = any(":" in kind for kind in kinds)
    own_weights = [kind for kind in kinds if kind in DRAFTERS]
    # `auto` takes a drafter that the user names, and not the shipped one of another proposer.
    arguments.drafter_of_auto = arguments.drafter
    if shipped:
        arguments.target = _SHIPPED / "target"
        if not arguments.target.is_dir():
            raise FileNotFoundError(
                f"there is no shipped checkpoint at {arguments.target} (an installed package has "
                "none): pass --target with a Hugging Face folder, or org/name on the Hub"
            )
        if drafted and arguments.draft is None:
            arguments.draft = _SHIPPED / "draft"
        if own_weights and arguments.drafter is None:
            shipped_one = _SHIPPED / DRAFTERS[own_weights[0]]
            arguments.drafter = shipped_one if shipped_one.is_dir() else None
    asked = ", ".join(kinds)
    if drafted and arguments.draft is None:
        raise ValueError(
            f"--proposer {drafted[0]} needs --draft with the folder of a smaller model; "
            "or use --proposer ngram"
        )
    if not (drafted or own or "auto" in kinds) and arguments.draft is not None:
        raise ValueError(f"--draft is not used by --proposer {asked}; leave one of them out")
    if "auto" in kinds and not (drafted or own_weights) and arguments.draft and arguments.drafter:
        raise ValueError("--proposer auto takes --draft or --drafter; leave one of them out")
    if own_weights and arguments.drafter is None:
        none = f"; there is none at {_SHIPPED / DRAFTERS[own_weights[0]]}" if shipped else ""
        made = "trained for this target (python -m train.drafter)"
        if own_weights[0] == "datastore":
            made = "built for this target (specjax datastore build)"
        raise ValueError(
            f"--proposer {own_weights[0]} needs --drafter with a folder that was {made}{none}"
        )
    if not (own_weights or "auto" in kinds) and arguments.drafter is not None:
        raise ValueError(f"--drafter is not used by --proposer {asked}; leave one of them out")
    sizes, whole = (vars(arguments).get(name) for name in ("mesh", "whole_draft"))
    if whole and (not sizes or arguments.draft is None):
        raise ValueError("--whole-draft is used with --mesh and a draft; leave it out, or add them")
    own = vars(arguments).get("draft_mesh")
    if own and arguments.draft is None:
        raise ValueError("--draft-mesh is used with a draft model: pass --proposer draft")
    mesh, draft_mesh = meshes(sizes or (own and {"data": 1, "model": 1}), own)
    split = {} if whole else RULES
    # Jobs of training have a LoRA and int8.
    lora, in_int8 = vars(arguments).get("lora"), arguments.dtype == "int8"
    dtype = None if in_int8 else arguments.dtype
    with progress("loading"):
        target = specjax.load(arguments.target, dtype, mesh=mesh, lora=lora)
        target = specjax.quantise(target) if in_int8 else target
        if arguments.draft is None:
            return target, None
        return target, _draft(arguments.draft, dtype, draft_mesh or mesh, split)


def meshes(
    sizes: Mapping[str, int] | None, own: Mapping[str, int] | None
) -> tuple[Mesh | None, Mesh | None]:
    """The meshes of `--mesh` and `--draft-mesh`, on the first devices and on those after them.

    Raises:
      ValueError: there are too few devices, or a process would have none.
    """
    if sizes is None:
        return None, None
    devices, first = jax.devices(), math.prod(sizes.values())
    if "model" not in sizes and own is None:
        first = max(len(devices) // first, 1) * first
    second = math.prod(own.values()) if own else 0
    if own and first + second > len(devices) > 1:
        raise ValueError(
            f"--mesh takes {first} devices and --draft-mesh {second} more, and there are "
            f"{len(devices)}: use fewer, or more processes or devices"
        )
    used = devices[: first + second] if first + second <= len(devices) else devices
    if lost := {d.process_index for d in devices} - {d.process_index for d in used}:
        raise ValueError(
            f"the first {len(used)} devices are not in process {min(lost)}: use devices of every "
            "process, or fewer processes"
        )
    mesh = make_mesh(**sizes, devices=used[:first])
    # A single device is shared, and Overlapped says so.
    rest = used[first:] if len(devices) > 1 else used
    return mesh, make_mesh(**{"model": 1, **own}, devices=rest) if own else None


def _draft(
    folder: str | pathlib.Path, dtype: str | None, mesh: Mesh | None, rules: Rules
) -> specjax.LanguageModel:
    """The draft; whole on each device if the mesh does not divide its heads or layers."""
    try:
        return specjax.load(folder, dtype, mesh=mesh, rules=rules)
    except Indivisible as error:
        print(f"the draft is whole on each device: {error}", file=sys.stderr)
        return specjax.load(folder, dtype, mesh=mesh, rules={})
