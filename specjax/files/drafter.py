"""`load_drafter`: reads a drafter's folder, whatever its format."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

from specjax.contract import Proposer
from specjax.drafters import Drafter, PublishedDrafter
from specjax.files.drafters import FORMATS, Tensors
from specjax.files.folder import INDEX, SINGLE, read_json, weight_files
from specjax.files.headers import open_tensors
from specjax.files.hub import MEDUSA_WEIGHTS, find_folder
from specjax.models import Config, LanguageModel
from specjax.parallel import RULES, Rules

_INSIDE = ("mtp.", "mtp_layers.", "model.mtp.")


def load_drafter(
    path: str | os.PathLike[str],
    target: LanguageModel,
    shape: Callable[..., Proposer] | None = None,
    *,
    revision: str | None = None,
    rules: Rules = RULES,
    **numbers: object,
) -> Drafter:
    """Read a published drafter for `target`, in the dtype of the target's weights.

    If the target is on a mesh, the drafter is split over it; Medusa heads are whole on each device.
    The format is recognised by the names of the tensors: see `specjax.files.drafters.FORMATS`.

    Args:
      path: a folder with `config.json` and safetensors, or `org/name` on the Hugging Face Hub.
      target: the model that the drafter was trained for.
      shape: how the drafts are arranged, such as `Chain`, `StaticTree` or `DynamicTree`; by default
        as the folder says, or else as the method's authors do.
      revision: a branch, tag or commit on the Hub.
      rules: as for `specjax.load`; {} keeps the whole drafter on each device.
      **numbers: arguments of `shape`.

    Raises:
      ValueError: with everything that does not fit the configuration or the target, and the fix.
      OSError: there is no such folder or model, or a file is missing or cannot be read.
    """
    if numbers and shape is None:
        raise ValueError(
            f"{', '.join(numbers)}= are arguments of a shape: pass the shape too, such as "
            "specjax.Chain or specjax.DynamicTree"
        )
    folder = find_folder(path, revision)
    name, config, tensors = open_drafter(folder)
    drafter = FORMATS[name].read(folder, config, tensors, target, rules)
    drafter.check(target)
    if shape is None:
        return drafter
    if not isinstance(drafter, PublishedDrafter):
        raise ValueError(
            f"{folder} holds drafts of the format {name!r}, whose tree is in the folder: "
            "leave shape= out"
        )
    return drafter.shaped(shape, **numbers)


def open_drafter(folder: pathlib.Path) -> tuple[str, Config, Tensors]:
    """The name of a folder's format, its configuration, and its tensors without a "model." prefix.

    Only headers are read.

    Raises:
      ValueError, OSError: as `load_drafter`.
    """
    config = read_json(folder / "config.json")
    if "quantization_config" in config:
        raise ValueError(
            f"{folder} is quantised (quantization_config); pass the unquantised drafter"
        )
    tensors, faults = open_tensors(_weights(folder))
    if faults:
        raise ValueError(f"the weights in {folder} are ambiguous:\n  " + "\n  ".join(faults))
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    for name, format in FORMATS.items():
        if format.matches(config, set(tensors)):
            return name, config, tensors
    if any(name.startswith(_INSIDE) for name in tensors):
        raise ValueError(
            f"{folder} holds the layers of a multi-token prediction head (mtp.*), which belong to "
            "targets of a family that specjax does not read; pass a drafter of another kind"
        )
    shown = ", ".join(sorted(tensors)[:4])
    raise ValueError(
        f"{folder} is no drafter of a format that specjax reads ({', '.join(FORMATS)}); its "
        f"tensors are {shown}, ...; a whole language model is loaded with specjax.load, and "
        "passed as draft="
    )


def _weights(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files with the weights.  Raises ValueError or OSError that says what is missing."""
    if (folder / MEDUSA_WEIGHTS).exists():
        return [folder / MEDUSA_WEIGHTS]
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pt*")])
    if pickled and not any((folder / name).exists() for name in (SINGLE, INDEX)):
        raise ValueError(
            f"{folder} holds pickled weights ({pickled[0].name}) only, and reading those executes "
            'what they contain; convert them: python -c "import torch, safetensors.torch as s; '
            f"w = torch.load('{pickled[0]}', weights_only=True); "
            "s.save_file({n: t.clone().contiguous() for n, t in w.items()}, "
            f"'{folder / SINGLE}')\""
        )
    try:
        return weight_files(folder)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}; if the drafter is published as pytorch_model.bin only, download and "
            "convert it: docs/models.md has the command"
        ) from None
