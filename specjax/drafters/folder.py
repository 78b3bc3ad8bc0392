"""`load_drafter` and `save_drafter`: folders of drafters, whatever their format."""

from __future__ import annotations

import json
import os
import pathlib
import weakref
from collections.abc import Callable
from typing import Literal, cast

from flax.traverse_util import flatten_dict
from jax import Array
from jax.typing import DTypeLike

from specjax._internal.checks import chosen, reworded, shown, typed
from specjax.contract import Proposer
from specjax.files import (
    CONFIG,
    MEDUSA_WEIGHTS,
    SINGLE,
    check_dtype,
    find_folder,
    headers_once,
    listed,
    open_tensors,
    read_json,
    read_scheme,
    replacing,
    weight_files,
    write_rows,
)
from specjax.methods import (
    METHODS,
    Drafter,
    Export,
    Format,
    MedusaAdapter,
    PublishedDrafter,
    Tensors,
    drafter_in_int8,
    save_medusa,
    with_switches,
)
from specjax.models import Config, Int8, LanguageModel
from specjax.parallel import RULES, Rules, leader

_MEDUSA = "official"
_INSIDE = ("mtp.", "mtp_layers.", "model.mtp.")


@headers_once()
def load_drafter(
    path: str | os.PathLike[str],
    target: LanguageModel,
    shape: Callable[..., Proposer] | None = None,
    *,
    revision: str | None = None,
    rules: Rules = RULES,
    dtype: Literal["int8"] | None = None,
    **numbers: object,
) -> Drafter:
    """Reads a published drafter for `target`, in the dtype of the target's weights.

    If the target is on a mesh, the drafter is split over it; Medusa heads are replicated.  The
    format is recognised by the names of the tensors: see `specjax.methods.METHODS`.  Packed
    matrices are dequantised.

    Args:
      path: a folder with `config.json` and safetensors, or `org/name` on the Hugging Face Hub.
      target: the model that the drafter was trained for.
      shape: the arrangement of the drafts, such as `Chain`, `StaticTree` or `DynamicTree`; by
        default as the folder says, or else as the method's authors do.
      revision: a branch, tag or commit on the Hub.
      rules: as for `specjax.load`; {} replicates the drafter.
      dtype: "int8" rounds the weights of an EAGLE-3, P-EAGLE or MTP drafter on one device.  That
        changes how many drafts are accepted, and not the text.
      **numbers: arguments of `shape`.

    Raises:
      ValueError: with every mismatch with the configuration or the target, and the fix.
      OSError: there is no such folder or model, or a file is missing or cannot be read.

    Example:
      >>> target = specjax.load(specjax.shipped("pycode/target"))
      >>> head = specjax.shipped("pycode/eagle3")
      >>> drafter = specjax.load_drafter(head, target, specjax.Chain, num_drafts=4)
      >>> drafter.proposer.max_depth
      4
    """
    if numbers and shape is None:
        raise ValueError(
            f"{', '.join(numbers)}= are arguments of a shape: pass the shape too, such as "
            "specjax.Chain or specjax.DynamicTree"
        )
    if dtype is not None:
        chosen("dtype", dtype, ("int8",))
    folder = find_folder(path, revision)
    name, config, tensors = open_drafter(folder)
    drafter = METHODS[name].format.read(folder, config, tensors, target, rules)
    drafter.check(target)
    drafter = drafter if dtype is None else drafter_in_int8(drafter)
    return drafter if shape is None else drafter.shaped(shape, **numbers)


def load_mtp(
    target: LanguageModel,
    shape: Callable[..., Proposer] | None = None,
    *,
    rules: Rules = RULES,
    feeds_normed: bool = True,
    zeroes_first: bool = False,
    head_tokens: int | None = None,
    **numbers: object,
) -> Drafter:
    """Reads the layers of multi-token prediction (MTP) in the target's own folder.

    `generate(target, prompt, proposer="mtp")` does so, too.  The folders of Qwen3-Next, Qwen3.5 and
    later, GLM-4.5 and later, DeepSeek V3, ERNIE 4.5 and Nemotron 3 have some; `target.mtp` is their
    number.  One layer drafts every depth, each from its own output for the depth before.  Of
    several, each drafts its own depth, and the last drafts what is deeper.

    Publishers disagree in two points, neither of which changes the text.  `specjax.tune` with both
    drafters in `drafters=` measures which one is accepted more.

    Args:
      target: as `specjax.load` returns it.
      shape, rules, numbers: as for `load_drafter`; by default a chain of 3 drafts, or of as many
        as there are layers, if these are more.
      feeds_normed: a draft's hidden state is the layer's output after the norm before the head, as
        in transformers and SGLang; False: before it, as in vLLM for DeepSeek, GLM and ERNIE.
      zeroes_first: the first pair of a text has zeros in place of its embedding, as in vLLM for
        DeepSeek, GLM, MiMo and ERNIE.
      head_tokens: draft only tokens with ids below this number; None: all.  Every draft reads the
        target's output matrix, which may be several times as large as the layer; the frequent
        tokens of a byte-pair vocabulary have the smallest ids.

    Raises:
      ValueError: the folder has no such layer, or one that does not fit.
      OSError: the folder cannot be read any more.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> target.mtp  # 1 in Qwen3.5, GLM-4.5 and DeepSeek V3
      0
      >>> how = {"drafter": specjax.load_mtp(target)} if target.mtp else {"proposer": "ngram"}
      >>> len(specjax.generate(target, "import os", max_new_tokens=4, **how).tokens[0])
      4
    """
    typed("what specjax.load(folder) returns", LanguageModel, target=target)
    typed("True or False", bool, feeds_normed=feeds_normed, zeroes_first=zeroes_first)
    if not target.mtp or target.folder is None:
        raise ValueError(
            f"the folder of {target.name} has no layer of multi-token prediction (target.mtp is "
            f'{target.mtp}): pass draft= or drafter=, or proposer="ngram"'
        )
    drafter = load_drafter(target.folder, target, rules=rules)
    assert isinstance(drafter, PublishedDrafter)
    drafter = with_switches(drafter, feeds_normed, zeroes_first, head_tokens)
    return drafter if shape is None else drafter.shaped(shape, **numbers)


_MTP: weakref.WeakKeyDictionary[LanguageModel, Drafter] = weakref.WeakKeyDictionary()
"""The MTP layers that were read, for as long as their targets live."""


def mtp_of(target: LanguageModel) -> Drafter:
    """Returns what `load_mtp(target)` does, and reads the layer only once for each target.

    Raises:
      ValueError, OSError: as `load_mtp`.
    """
    if target not in _MTP:
        _MTP[target] = load_mtp(target)
    return _MTP[target]


def save_drafter(
    folder: str | os.PathLike[str],
    drafter: PublishedDrafter | MedusaAdapter,
    target: LanguageModel,
    layout: str | None = None,
    dtype: DTypeLike | None = None,
) -> None:
    """Writes a folder that `load_drafter` and the libraries of a layout read.

        EAGLE-3               "official" (the authors, SpecForge, SGLang, vLLM), "speculators"
        P-EAGLE               "speculators", "specforge"
        DFlash, DFlash-2      "z-lab", "speculators"
        DSpark                "deepspec", "specforge", "speculators"
        Domino                "specforge"
        Medusa                "official"
        MTP                   "qwen", "deepseek", "ernie", "mimo", "nemotron"

    The layers of the target are always named, in the key and the numbering of the layout.  Where
    its library needs tables in the file that the drafter shares with its target, the target's are
    written: the head in EAGLE-3's "official", both in "deepspec", "speculators" and P-EAGLE's
    "specforge".  `load_drafter` recognises them, and uses the target's.  The shape of the drafts is
    written as a number of drafts where the layout has a field for it; a threshold of confidence is
    not written.

    An interrupted save leaves the old drafter, the new one, or a folder without config.json, which
    cannot be loaded.  Of several processes only the first writes, but all must call.

    Args:
      folder: created if needed; a drafter in it is replaced, other files stay.
      drafter: with its own parameters.
      target: the model that the drafter was made for.
      layout: a name of the table; by default the first of the drafter's row that can hold it.
      dtype: of the weights, rounded to nearest; by default the dtype that they have.

    Raises:
      ValueError: another kind of drafter, another target, or a layout that cannot hold the drafter;
        the message names those that can.  Or the folder holds something else than a drafter.

    Example:
      >>> target = specjax.load(specjax.shipped("pycode/target"))
      >>> heads = specjax.load_drafter(specjax.shipped("pycode/medusa"), target)
      >>> specjax.save_drafter("heads", heads, target, dtype="bfloat16")
      >>> specjax.load_drafter("heads", target).proposer == heads.proposer
      True
    """
    own = "a drafter with weights of its own, as specjax.load_drafter returns it"
    typed(own, PublishedDrafter | MedusaAdapter, drafter=drafter)
    typed("what specjax.load(folder) returns", LanguageModel, target=target)
    drafter.check(target)
    dtype, folder = None if dtype is None else check_dtype(dtype), pathlib.Path(folder)
    if isinstance(drafter, MedusaAdapter):
        chosen("layout", layout, (None, _MEDUSA))
        _refuse_others(folder)
        if not leader():
            return save_medusa(folder, drafter, target.name, dtype)
        with replacing(folder, (MEDUSA_WEIGHTS,)) as new:
            return save_medusa(new, drafter, target.name, dtype)
    export = _plan(drafter, target, layout)
    _check_shapes(drafter, export)
    _refuse_others(folder)
    written = export.rows, export.params, dtype, export.tables
    if not leader():
        write_rows(folder / SINGLE, *written)
        return None
    with replacing(folder, (MEDUSA_WEIGHTS,)) as new:
        name = write_rows(new / SINGLE, *written).name
        # The second is the older name, which transformers 4 reads.
        config = {**export.config, "dtype": name, "torch_dtype": name}
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return None


def _plan(drafter: PublishedDrafter, target: LanguageModel, layout: str | None) -> Export:
    """Plans the export.  Raises ValueError if no layout of this name can hold the drafter."""
    format: Format | None = next(
        (m.format for m in METHODS.values() if m.format.makes(drafter)), None
    )
    if format is None:
        raise ValueError(
            f"the drafter {drafter.name} has a {type(drafter.source).__name__}, which no format "
            f"of drafters has ({', '.join(METHODS)})"
        )
    if any(isinstance(leaf, Int8) for leaf in flatten_dict(drafter.params).values()):
        raise ValueError(
            f"the drafter {drafter.name} holds weights in int8: save it as load_drafter reads it "
            "without dtype="
        )
    faults = {name: known.faults(drafter, target) for name, known in format.layouts.items()}
    able = [name for name in faults if not faults[name]]
    cure = f"pass layout={' or '.join(map(repr, able))}" if able else "no layout can"
    why = None
    if layout is not None and layout not in list(faults):  # it may be of any type
        known = ", ".join(map(repr, faults))
        why = f"layout={shown(layout)} is not one of {known}, which drafters of this kind have"
    elif layout is not None and faults[layout]:
        found = " and ".join(faults[layout])
        why = f"the layout {layout!r} cannot hold the drafter {drafter.name}, which {found}"
    elif not able:
        lines = [f"{name!r}: it {' and '.join(found)}" for name, found in faults.items()]
        why = f"the drafter {drafter.name} cannot be written:\n  " + "\n  ".join(lines) + "\n  so"
    if why is not None:
        raise ValueError(f"{why}: {cure}")
    return format.layouts[layout or able[0]].export(drafter, target)


def _check_shapes(drafter: PublishedDrafter, export: Export) -> None:
    """Raises ValueError unless each parameter that is written is there, in its shape."""
    found = flatten_dict(export.params)
    if any(isinstance(leaf, Int8) for leaf in found.values()):
        raise ValueError(
            f"the drafter {drafter.name} uses the head of its target, which is quantised: pass the "
            "target without int8"
        )
    held = cast(dict[tuple[str, ...], Array], found)
    faults = []
    for path, shape in export.shapes.items():
        turned = (*path[:-1], "weight")  # a kernel that is held as [out, in]
        if path not in held and turned in held:
            path, shape = turned, shape[::-1]
        if path not in held or held[path].shape != shape:
            fault = f"has shape {list(held[path].shape)}" if path in held else "is missing"
            faults.append(f"{'/'.join(path)} {fault}; its source needs {list(shape)}")
    if faults:
        raise ValueError(
            f"parameters of the drafter {drafter.name} do not belong to its source; pass its "
            f"own:\n  {listed(faults)}"
        )


def _refuse_others(folder: pathlib.Path) -> None:
    """Raises ValueError if the folder holds a model, which would be replaced."""
    if not (folder / CONFIG).exists():
        return
    before = f"{folder} holds something else than a drafter, which would be replaced: pass another "
    with reworded(f"{before}folder (", ")", (ValueError, OSError)):
        open_drafter(folder)


def open_drafter(folder: pathlib.Path) -> tuple[str, Config, Tensors]:
    """Returns the name of a folder's format, its configuration, and its tensors without "model.".

    Only headers are read, and of packed matrices (`files.packed`) the scales.

    Raises:
      ValueError, OSError: as `load_drafter`.
    """
    config = read_json(folder / "config.json")
    scheme = read_scheme(folder, config)
    tensors, faults = open_tensors(_weights(folder))
    if scheme is not None and not faults:
        tensors, faults = scheme.open(tensors)
    if faults:
        raise ValueError(f"the weights in {folder} cannot be read:\n  {listed(faults)}")
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    return recognised(folder, config, tensors), config, tensors


def recognised(folder: pathlib.Path, config: Config, tensors: Tensors) -> str:
    """Returns the name of a folder's format.  Raises ValueError if it has none."""
    for name, method in METHODS.items():
        if method.format.matches(config, tensors):
            return name
    cure = "a whole language model is loaded with specjax.load, and passed as draft="
    if any(name.startswith(_INSIDE) for name in tensors):
        cure = (
            "these are layers of multi-token prediction (mtp.*) in a form that specjax does not "
            "read: pass a drafter of another kind"
        )
    raise ValueError(
        f"{folder} is not a drafter of a format that specjax reads ({', '.join(METHODS)}); its "
        f"tensors are {', '.join(sorted(tensors)[:4])}, ...; {cure}"
    )


def _weights(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files with the weights.  Raises ValueError or OSError with what is missing."""
    if (folder / MEDUSA_WEIGHTS).exists():
        return [folder / MEDUSA_WEIGHTS]
    return weight_files(folder)
