"""`specjax inspect FOLDER` describes a published drafter, or packed weights, only from headers."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

import jax

from specjax.drafters import open_drafter
from specjax.files import (
    CONFIG,
    file_of,
    find_folder,
    forms,
    open_tensors,
    read_config,
    read_json,
    read_scheme,
    refuse_weights,
    tensors_of,
    weight_files,
)
from specjax.methods import METHODS
from specjax.models import LanguageModel, LinenModel, Transformer
from specjax.options.command import parse
from specjax.options.fields import REQUIRED, Options, option

_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "BOOL": 1, "U8": 1, "I8": 1}
"""The bytes of a number, by the names that safetensors has for dtypes."""

_TABLES = ("BOOL", "I32", "I64", "U8")


@dataclasses.dataclass(frozen=True)
class InspectOptions(Options):
    """The options of `specjax inspect`."""

    group = "inspection"

    folder: str = option(
        REQUIRED,
        "folder with config.json and safetensors, or org/name on the Hub: of a drafter, or of a "
        "target with packed weights",
        positional=True,
    )
    target: str | None = option(
        None, "folder of the target, or org/name: checks that the drafter fits its sizes"
    )
    json: bool = option(False, "print one JSON object and nothing else")


def main(prog: str, argv: list[str]) -> None:
    arguments = parse(InspectOptions, argv, prog=prog)
    folder = find_folder(arguments.folder)
    if file_of(folder) is not None:
        _describe_packed(folder, arguments)
        return
    packed = read_scheme(folder, read_json(folder / CONFIG)) is not None
    try:
        name, config, tensors = open_drafter(folder)
    except ValueError:
        if not packed:
            raise
        _describe_packed(folder, arguments)  # it is no drafter
        return
    of_target = _packed(folder) if packed and name == "mtp" else None
    target = None if arguments.target is None else _abstract(arguments.target)
    found = METHODS[name].format.describe(config, tensors, target)
    if found.tensors is not None:
        tensors = {name: tensors[name] for name in found.tensors}
    weights = [tensor for tensor in tensors.values() if tensor.kind not in _TABLES]
    facts = {
        "format": name,
        "method": found.method,
        "layout": found.packaging,
        "taps": None if found.taps is None else list(found.taps),
        "num_drafts": found.num_drafts,
        "shares": list(found.shares),
        "parameters": sum(math.prod(tensor.shape) for tensor in weights),
        "bytes": sum(
            math.prod(tensor.shape) * _BYTES.get(tensor.kind, 1) for tensor in tensors.values()
        ),
        "dtypes": sorted({tensor.kind for tensor in weights}),
        "details": list(found.details),
    }
    if of_target is not None:
        facts["packed"] = of_target[0]
    if arguments.json:
        print(json.dumps(facts))
        return
    taps = "layers that depend on the target; pass --target"
    if found.taps is not None:
        taps = f"the outputs of its layers {', '.join(map(str, found.taps))} (0 is the embedding)"
        if target is not None and target.model.num_taps - 1 in found.taps:
            taps += f"; {target.model.num_taps - 1} is the last one after the final norm"
        taps = taps if found.taps else "its last hidden state"
    rows = [
        ("drafter", f"{found.method}, layout of {found.packaging} (format {name})"),
        ("reads of the target", taps),
        ("drafts in a step", f"{found.num_drafts} deep, so at most {found.num_drafts + 1} tokens"),
        ("uses of the target", " and ".join(found.shares) or "nothing"),
        (
            "size",
            f"{facts['parameters']:,} parameters, {facts['bytes']:,} bytes, "
            f"{', '.join(facts['dtypes'])}",
        ),
        *(("", line) for line in found.details),
    ]
    if target is not None:
        rows.append(("fits", f"{target.name} in its sizes"))
    if of_target is not None:
        rows += of_target[1]
    for label, text in rows:
        print(f"  {label:<22}{text}")


def _describe_packed(folder: pathlib.Path, arguments: InspectOptions) -> None:
    """Prints the formats of a target with packed weights."""
    if arguments.target is not None:
        raise ValueError(
            f"{folder} has packed weights, so it is no drafter; leave out --target {folder.name}"
        )
    facts, rows = _packed(folder)
    if arguments.json:
        print(json.dumps(facts))
        return
    for label, text in rows:
        print(f"  {label:<22}{text}")


def _packed(folder: pathlib.Path) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Returns the formats of a target with packed weights, as facts and as lines."""
    config, _, ours = read_config(folder)
    file = file_of(folder)
    if file is not None:
        method, (opened, faults) = "GGUF", tensors_of(file)
        size = file.stat().st_size
    else:
        scheme = read_scheme(folder, config)
        assert scheme is not None
        held, faults = open_tensors(weight_files(folder))
        opened, more = scheme.open(held)
        method, faults = scheme.method, faults + more
        size = sum(math.prod(t.shape) * _BYTES.get(t.kind, 1) for t in held.values())
    refuse_weights(folder, faults)
    found = forms(opened)
    facts = {
        "model_type": ours.family,
        "method": method,
        "formats": found,
        "plain": len(opened) - sum(found.values()),
        "parameters": sum(math.prod(tensor.shape) for tensor in opened.values()),
        "bytes": size,
    }
    packed = ", ".join(f"{many} matrices in {form}" for form, many in found.items())
    rows = [
        ("model", f"{ours.family}, {ours.num_layers} layers"),
        ("quantisation", f"{method}: {packed}; {facts['plain']} plain tensors"),
        ("size", f"{facts['parameters']:,} parameters, {facts['bytes']:,} bytes"),
    ]
    return facts, rows


def _abstract(path: str) -> LanguageModel:
    """Returns a target without weights: the shapes of its parameters, from its configuration."""
    folder = find_folder(path)
    model = LinenModel(Transformer(read_config(folder)[2]))
    params = jax.eval_shape(model.init, jax.random.key(0))
    return LanguageModel(model, params, name=folder.name)
