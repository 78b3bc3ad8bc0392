"""The options that name models, and the functions that read these models and make proposers."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import jax
from jax.sharding import Mesh

import specjax
from specjax._internal.checks import reworded, settle
from specjax.drafters import adaptive, arrange, as_chain, drafter_by_name
from specjax.generation import Options as Keywords
from specjax.options.fields import Options, option
from specjax.options.speculation import (
    DRAFTED,
    DRAFTERS,
    Value,
    check_numbers,
    given,
    numbers_of,
    reads,
)
from specjax.options.waiting import progress
from specjax.parallel import RULES, Indivisible, Rules, make_mesh, parse_mesh

Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Devices:
    """The sizes of the meshes of the target and of the draft; None: one device, and the target's.

    With `whole_draft` the layers of the draft are not sharded.
    """

    sizes: Sizes | None = None
    draft_sizes: Sizes | None = None
    whole_draft: bool = False


@dataclasses.dataclass(frozen=True)
class DeviceOptions(Options):
    """The mesh of a command."""

    group = "device"

    mesh: str | None = option(
        None,
        "device mesh: rows are sharded over N and each layer over M, on the first N x M devices; "
        "default: one device",
        metavar="data=N,model=M",
    )
    whole_draft: bool = option(False, "with --mesh: do not shard the draft's layers")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.devices()

    def devices(self) -> Devices:
        """Returns what the options say, or raises ValueError for a mesh that cannot be read."""
        return Devices(self.sizes("mesh", self.mesh), None, self.whole_draft)

    @staticmethod
    def sizes(name: str, mesh: str | None) -> Sizes | None:
        """Returns the sizes of a mesh that is written as an option."""
        with reworded(f"--{name} "):
            return None if mesh is None else parse_mesh(mesh)


@dataclasses.dataclass(frozen=True)
class ModelOptions(Options):
    """The models of a command."""

    group = "model"

    target: str | None = option(
        None, "folder of the target, or org/name on the Hub; default: the shipped target"
    )
    draft: str | None = option(
        None,
        "folder of the draft, or org/name on the Hub; default: the shipped draft, with the shipped "
        "target",
    )
    draft_vocab: int | None = option(
        None,
        "only this many tokens of the draft can be drafted, those with the smallest ids, and it "
        "reads only their part of its output matrix; the text stays the same",
    )
    draft_window: int | None = option(
        None,
        "the draft attends to so many of the last tokens only, so that long texts do not make it "
        "slower; the text stays the same",
    )
    drafter: str | None = option(
        None,
        "folder of a drafter that was trained for the target (Medusa, EAGLE-3, DFlash, ...), of a "
        "datastore, or org/name on the Hub; default: the shipped one, with the shipped target",
        names=("--adapter",),
    )
    drafter_dtype: Literal["int8"] | None = option(
        None,
        "int8 rounds the weights of an EAGLE-3, P-EAGLE or MTP drafter, which is faster on a CPU; "
        "the text stays the same",
    )
    dtype: str | None = option(
        None,
        "float32, bfloat16 or float16 (default: float32 on a CPU, else bfloat16), or int4 for the "
        "matrices of linear maps",
    )
    dequantise: bool = option(
        False, "widen the packed matrices of the target when it is loaded, which takes more memory"
    )
    activations: str | None = option(
        None,
        "int8: on a CPU, round what packed matrices of the target multiply to 8 bits, which is "
        "faster; it is then another model, with other texts",
    )
    cache_dtype: str | None = option(
        None,
        "int8 or float8: the target's keys and values take 8 bits, rounded token by token, and "
        "texts are those of the rounded cache",
    )


@dataclasses.dataclass(frozen=True)
class Models:
    """The models of a command, in memory."""

    target: specjax.LanguageModel
    draft: specjax.LanguageModel | None = None
    drafter: str | pathlib.Path | None = None  # the folder of a drafter
    of_auto: str | None = None  # `auto` takes a drafter that the user names, and not a shipped one
    drafter_dtype: Literal["int8"] | None = None

    def read(self, folder: str | pathlib.Path) -> specjax.Drafter:
        """Reads the drafter in a folder."""
        return specjax.load_drafter(folder, self.target, dtype=self.drafter_dtype)


def choose(options: ModelOptions, rule: str | None = None, draft_mesh: bool = False) -> str:
    """Returns the kind of proposer: `--proposer`, or a default that fits the folders.

    With a rule under which no text depends on the drafts the default is "auto", unless numbers of
    a proposer were given.  None is for jobs that measure drafts.
    """
    proposer = getattr(options, "proposer", None)
    if proposer is not None:
        return proposer
    if draft_mesh:
        return "draft"
    if rule is not None and specjax.RULES[rule].fixes_text() and not given(options):
        return "auto"
    if options.drafter is not None:
        return "drafter"
    return "draft" if options.draft is not None or options.target is None else "ngram"


def load_models(
    options: ModelOptions,
    kinds: Sequence[str],
    rules: Sequence[str] = (),
    devices: Devices = Devices(),
    lora: str | None = None,
    keep_bfloat16: bool = True,
) -> Models:
    """Loads the target, and the draft if one of these kinds of proposers needs one.

    If there is no `--target`, the missing folders are the shipped ones.  Without `--dtype` the
    target's matrices stay in bfloat16, as `specjax.load` says, unless `keep_bfloat16` is False: a
    target that gets the weights of a trainer later may get them in another dtype.

    Raises:
      ValueError, FileNotFoundError: folders or options do not fit the proposers and rules; raised
        before anything is read.
    """
    check_numbers(options, kinds, rules)
    drafted = [kind for kind in kinds if kind in DRAFTED]
    own_weights = [kind for kind in kinds if kind in DRAFTERS]
    own = any(":" in kind for kind in kinds)
    folder, draft, drafter = options.target, options.draft, options.drafter
    if folder is None:
        folder = specjax.shipped("pycode/target")
        if drafted and draft is None:
            draft = specjax.shipped("pycode/draft")
        if own_weights and drafter is None:
            name = DRAFTERS[own_weights[0]]
            drafter = None if name is None else specjax.shipped(f"pycode/{name}")
    asked, auto = ", ".join(kinds), "auto" in kinds
    made = "trained for this target (specjax train drafter, or medusa)"
    if "datastore" in own_weights[:1]:
        made = "built for this target (specjax datastore build)"
    sizes, own_sizes = devices.sizes, devices.draft_sizes
    settle(
        (
            drafted and draft is None,
            f"--proposer {''.join(drafted[:1])} needs --draft with the folder of a smaller model; "
            "or use --proposer ngram",
        ),
        (
            not (drafted or own or auto) and draft is not None,
            f"--draft is not used by --proposer {asked}; leave one of them out",
        ),
        (
            auto and not (drafted or own_weights) and draft and drafter,
            "--proposer auto takes --draft or --drafter; leave one of them out",
        ),
        (
            own_weights and drafter is None,
            f"--proposer {''.join(own_weights[:1])} needs --drafter with a folder that was {made}",
        ),
        (
            not (own_weights or auto) and drafter is not None,
            f"--drafter is not used by --proposer {asked}; leave one of them out",
        ),
        (
            devices.whole_draft and (not sizes or draft is None),
            "--whole-draft is used with --mesh and a draft; leave it out, or add them",
        ),
        (
            own_sizes and draft is None,
            "--draft-mesh is used with a draft model: pass --proposer draft",
        ),
    )
    mesh, draft_mesh = meshes(sizes or (own_sizes and {"data": 1, "model": 1}), own_sizes)
    split = {} if devices.whole_draft else RULES
    in_int8 = options.dtype == "int8"  # jobs of training have it
    dtype = None if in_int8 else options.dtype
    settle(
        (
            options.draft_vocab is not None and draft is None,
            "--draft-vocab is used with a draft model: add --draft, or leave it out",
        ),
        (
            options.draft_window is not None and draft is None,
            "--draft-window is used with a draft model: add --draft, or leave it out",
        ),
        (
            options.drafter_dtype is not None and drafter is None,
            "--drafter-dtype is used with --drafter: add it, or leave it out",
        ),
    )
    with progress("loading"):
        target = specjax.load(
            folder, dtype, cache_dtype=options.cache_dtype, activations=options.activations,
            mesh=mesh, lora=lora, dequantise=options.dequantise,
            keep_bfloat16=keep_bfloat16 and dtype is None,
        )  # fmt: skip
        target = specjax.quantise(target) if in_int8 else target
        model = None if draft is None else _draft(draft, dtype, draft_mesh or mesh, split)
        if model is not None and options.draft_vocab is not None:
            with reworded("--draft-vocab: "):
                model = specjax.trim_vocabulary(model, options.draft_vocab)
        if model is not None and options.draft_window is not None:
            with reworded("--draft-window: "):
                model = specjax.window_draft(model, options.draft_window)
    return Models(target, model, drafter, options.drafter, options.drafter_dtype)


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
        return specjax.load(folder, dtype, mesh=mesh, rules=rules, keep_bfloat16=dtype is None)
    except Indivisible as error:
        print(f"the draft is whole on each device: {error}", file=sys.stderr)
        return specjax.load(folder, dtype, mesh=mesh, rules={})


def make_drafter(kind: str, models: Models, numbers: Mapping[str, Value]) -> specjax.Drafter:
    """Returns the proposer of this kind, with its weights and the numbers that were given."""
    target, draft, most = models.target, models.draft, numbers.get("num_drafts")
    if kind == "datastore":
        if most == 0:
            return drafter_by_name("none", target)
        assert models.drafter is not None  # `load_models` has checked it
        own = {name: value for name, value in numbers.items() if reads(kind, name)}
        store = specjax.load_datastore(models.drafter)
        return store.drafter(target, **cast(dict[str, Any], own))
    if kind == "mtp" and most == 0:
        return drafter_by_name("none", target)
    if kind in DRAFTERS or kind == "mtp":
        if kind == "mtp":
            loaded = specjax.load_mtp(target)
        else:
            assert models.drafter is not None
            loaded = models.read(models.drafter)
        shape = (numbers.get(name) for name in ("num_drafts", "num_nodes", "width"))
        return arrange(loaded, *(cast(int | None, number) for number in shape))
    if ":" in kind:
        return drafter_by_name(kind, target, draft)
    if kind == "auto" and draft is None and models.of_auto is not None:
        loaded = models.read(models.of_auto)
        if most == 0:
            return drafter_by_name("none", target)
        return adaptive(as_chain(loaded, cast(int | None, most)))
    if kind == "auto" and most is None:
        return drafter_by_name(kind, target, draft)
    own = numbers_of(kind, numbers)
    gamma = own.get("num_drafts")
    if isinstance(gamma, int) and gamma < 0:
        raise ValueError(f"num_drafts={gamma}; it must be 0 (plain) or greater")
    if gamma == 0:
        return drafter_by_name("none", target)
    return drafter_by_name(kind, target, draft, dtype=None, **own)


def drafting(kind: str, models: Models, numbers: Mapping[str, Value], rule: str) -> Keywords:
    """Returns the arguments of `generate` for the proposer of this kind.

    `auto` with the folder of a drafter is left to `generate`, which follows a plan.
    """
    if kind == "auto" and models.draft is None and models.of_auto is not None:
        if specjax.RULES[rule].fixes_text() and not numbers:
            loaded = models.read(models.of_auto)
            return {"drafter": loaded, "proposer": "auto"}
    return {"drafter": make_drafter(kind, models, numbers)}
