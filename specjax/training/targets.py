"""The target of a training job: its options, and the function that loads it."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TypeVar

import jax.numpy as jnp
from jax.sharding import Mesh

from specjax._internal.platforms import default_platform
from specjax.files import file_of, find_folder, load
from specjax.models import LanguageModel, LinenModel, attend, quantise, quantised_form
from specjax.options.fields import REQUIRED, Options, option
from specjax.parallel import TRAINING_RULES
from specjax.sampling import Sampling
from specjax.training.precision import mixed_dot_general

_INT8 = "int8"
DTYPES = ("float32", "bfloat16", _INT8)


@dataclasses.dataclass(frozen=True)
class TargetOptions(Options):
    """The target, and a LoRA of it."""

    group = "target"

    target: str = option(REQUIRED, "folder of the target, or org/name on the Hub")
    lora: str | None = option(
        None, "folder of a LoRA for the target, as PEFT writes it, which is merged into the weights"
    )

    @property
    def tokenizer_file(self) -> str:
        """The tokenizer.json of the target, or of the LoRA if it has one."""
        folders = [find_folder(path) for path in (self.lora, self.target) if path is not None]
        homes = [folder if folder.is_dir() else folder.parent for folder in folders]  # of a GGUF
        files = [home / "tokenizer.json" for home in homes]
        return str(next((file for file in files if file.exists()), files[-1]))


@dataclasses.dataclass(frozen=True)
class ServedOptions(TargetOptions):
    """The target in the type that it is served in."""

    dtype: str | None = option(
        None,
        "type of the target's weights, as it will be served; by default float32 on a CPU, else "
        "bfloat16",
        choices=DTYPES,
    )


@dataclasses.dataclass(frozen=True)
class ServingOptions(Options):
    """The sampling settings that the target is served with."""

    group = "target"

    temperature: float = option(
        1.0, "temperature that the target will be served with, for its text and in losses"
    )
    top_k: int = option(0, "top-k that the target will be served with; 0: off")
    top_p: float = option(1.0, "top-p that the target will be served with; 1: off")

    def __post_init__(self) -> None:
        super().__post_init__()
        Sampling.create(1, **self.settings)

    @property
    def settings(self) -> dict[str, float]:
        """The settings that the target is served with, as `Sampling.create` takes them."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    @property
    def serving(self) -> Sampling | None:
        """These settings, which are constants of a program; None: all are off, and cost nothing."""
        plain = self.settings == {"temperature": 1, "top_k": 0, "top_p": 1}
        return None if plain else Sampling.create(1, **self.settings)


def dtype_of(dtype: str | None) -> str:
    """Returns the name of the type in which a target is loaded for `--dtype`."""
    return dtype or ("float32" if default_platform() == "cpu" else "bfloat16")


def load_target(
    options: TargetOptions, dtype: str | None, mesh: Mesh | None = None
) -> LanguageModel:
    """Returns the target of a job, in one of `DTYPES`; None is the default of this machine.

    Raises:
      ValueError, OSError: it has no tokenizer; or as `load`.
    """
    if (
        not pathlib.Path(options.tokenizer_file).exists()
        and file_of(find_folder(options.target)) is not None
    ):
        raise ValueError(
            f"--target {options.target} has no tokenizer.json beside it; --data is tokenised with "
            "one. If the GGUF file has a tokenizer, write a folder by "
            f"specjax.save(specjax.load({options.target!r}, dequantise=True), FOLDER), and pass "
            "--target FOLDER"
        )
    loaded = load(
        options.target,
        None if dtype == _INT8 else dtype,
        mesh=mesh,
        rules=TRAINING_RULES,
        lora=options.lora,
        dequantise=True,
    )
    if loaded.tokenizer is None:
        raise ValueError(
            f"--target {options.target} has no tokenizer.json; --data is tokenised with it"
        )
    return quantise(loaded) if dtype == _INT8 else loaded


Sequences = TypeVar("Sequences", bound=Options)
"""Options with a `sequence_length`."""


def fitted(options: Sequences, target: LanguageModel) -> Sequences:
    """Returns the options; a default `sequence_length` is cut to what the target can read."""
    most = target.model.max_positions
    field = next(f for f in dataclasses.fields(options) if f.name == "sequence_length")
    if vars(options)[field.name] != field.default or field.default <= most:
        return options
    print(f"the target reads at most {most} tokens, so sequences have {most} (--sequence-length)")
    return dataclasses.replace(options, **{field.name: most})


def reader(target: LanguageModel) -> LinenModel:
    """Returns the network of a target, as losses read it.

    A target in float32 multiplies in bfloat16, which is fast.  In another type it computes as it
    is served.
    """
    if quantised_form(target) is target or target.model.dtype != jnp.float32:
        return target.model
    return LinenModel(target.model.module.clone(dot_general=mixed_dot_general, attend=attend))
