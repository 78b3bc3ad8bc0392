"""Reads the target and the draft that the options of a command name, on their devices."""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import Mesh

import specjax
from specjax.flags.speculation import DRAFTED, DRAFTERS, check_numbers
from specjax.flags.waiting import progress
from specjax.parallel import RULES, Indivisible, Rules, make_mesh


def load_models(
    arguments: argparse.Namespace, kinds: Sequence[str], rules: Sequence[str] = ()
) -> tuple[specjax.LanguageModel, specjax.LanguageModel | None]:
    """Loads the target, and the draft if one of these kinds of proposers needs one.

    If there is no `--target`, this sets the missing folders in `arguments` to the shipped ones.
    `arguments.drafter_of_auto` is the `--drafter` that was given, or None.

    Raises:
      ValueError, FileNotFoundError: folders or options do not fit the proposers and rules; raised
        before anything is read.
    """
    check_numbers(arguments, kinds, rules)
    drafted, with_shipped = [kind for kind in kinds if kind in DRAFTED], arguments.target is None
    own = any(":" in kind for kind in kinds)
    own_weights = [kind for kind in kinds if kind in DRAFTERS]
    # `auto` takes a drafter that the user names, and not the shipped one of another proposer.
    arguments.drafter_of_auto = arguments.drafter
    if with_shipped:
        arguments.target = specjax.shipped("pycode/target")
        if drafted and arguments.draft is None:
            arguments.draft = specjax.shipped("pycode/draft")
        if own_weights and arguments.drafter is None:
            name = DRAFTERS[own_weights[0]]
            arguments.drafter = None if name is None else specjax.shipped(f"pycode/{name}")
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
        made = "trained for this target (specjax train drafter, or medusa)"
        if own_weights[0] == "datastore":
            made = "built for this target (specjax datastore build)"
        raise ValueError(
            f"--proposer {own_weights[0]} needs --drafter with a folder that was {made}"
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
    """Returns the meshes of `--mesh` and `--draft-mesh`, on the first devices and the next ones.

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
    """Returns the draft, replicated if the mesh does not divide its heads or layers."""
    try:
        return specjax.load(folder, dtype, mesh=mesh, rules=rules)
    except Indivisible as error:
        print(f"the draft is whole on each device: {error}", file=sys.stderr)
        return specjax.load(folder, dtype, mesh=mesh, rules={})
