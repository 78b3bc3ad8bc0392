"""`Plan`: what `specjax.tune` measured, as a table, and as a file that later calls read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import warnings
from typing import Any

import jax
import numpy as np

from specjax import kernels
from specjax.decoding import Decoder
from specjax.folders import cache_folder
from specjax.proposers import Adaptive
from specjax.tune.options import Learned

_MARGIN = 0.05


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to decode the prompts."""

    name: str
    tokens_per_pass: float
    predicted: float | None  # tokens/s, by the seconds of its steps
    measured: float | None  # tokens/s; None if other processes disturbed every sample


@dataclasses.dataclass(frozen=True)
class Plan:
    """The seconds of a step with each option, and what they and the prompts say."""

    about: dict[str, Any]  # the models' structures, device, versions, rows; the key of the file
    seconds: tuple[float, ...]  # of a step with each of `Adaptive.options`
    prior: tuple[float, float]  # acceptance rates of lookup and drafter
    candidates: tuple[Candidate, ...]  # plain decoding first, then the others, "auto" last

    @property
    def best(self) -> Candidate:
        """The fastest by measurement, or by prediction where nothing was measured."""
        return max(self.candidates, key=lambda one: one.measured or one.predicted or 0.0)

    def fixed(self) -> tuple[str, int]:
        """The option, as in `Adaptive.options`, that is fastest where every step has its width.

        Such is an engine: its passes are as wide for rows without drafts.  Drafts have to gain more
        than estimates err, else it is plain decoding.
        """
        options = [(str(name), int(depth)) for name, depth in self.about["options"]]
        speeds = [
            one.tokens_per_pass / seconds
            for one, seconds in zip(self.candidates, self.seconds, strict=False)
        ]
        best = max(range(len(options)), key=speeds.__getitem__)
        return options[best] if speeds[best] > (1 + _MARGIN) * speeds[0] else options[0]

    @property
    def path(self) -> pathlib.Path:
        """Where `save` writes it."""
        text = json.dumps(self.about, sort_keys=True)
        return cache_folder("plans") / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def save(self) -> pathlib.Path:
        """Write it to the cache directory, where calls of `generate` on this device find it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = json.dumps(dataclasses.asdict(self), indent=1) + "\n"
        partial = self.path.with_suffix(f".{os.getpid()}")
        partial.write_text(whole)
        partial.replace(self.path)
        return self.path

    def __str__(self) -> str:
        """A table, and what to do."""
        plain = self.candidates[0].measured
        lines = [
            f"{'':<28} tokens a pass  predicted   measured      off  speed-up",
        ]
        for one in self.candidates:
            off = gain = ""
            if one.predicted and one.measured:
                off = f"{100 * (one.predicted / one.measured - 1):+.0f} %"
            if one.measured and plain:
                gain = f"{one.measured / plain:.2f} x"
            predicted, measured = (
                "" if rate is None else f"{rate:.0f}" for rate in (one.predicted, one.measured)
            )
            lines.append(
                f"{one.name:<28} {one.tokens_per_pass:>13.2f} {predicted:>10} {measured:>10} "
                f"{off:>8} {gain:>9}"
            )
        if any(one.measured is None for one in self.candidates):
            lines.append("(where no speed is measured, other processes disturbed every sample)")
        return "\n".join(["tokens/s of all rows".rjust(56), *lines, "", self.advice()])

    def advice(self) -> str:
        """One sentence: what to pass to `generate`."""
        plain, best = self.candidates[0], self.best
        if best.name == plain.name:
            return (
                "Nothing was faster than plain decoding here: leave the draft out, or train one "
                '(specjax train distill). proposer="auto" will not draft on such texts.'
            )
        return f'The fastest is {best.name}. proposer="auto" starts from these figures.'


def about(decoder: Decoder, rows: int, samples: bool) -> dict[str, Any]:
    """What the seconds of a step depend on, without the weights."""
    assert isinstance(decoder.proposer, Adaptive)
    device = jax.devices()[0]
    digest = hashlib.sha256(repr((decoder.target, decoder.proposer)).encode()).hexdigest()
    return {
        "structure": digest,
        "options": [list(option) for option in decoder.proposer.options],
        "rows": 1 << (rows - 1).bit_length(),
        "samples": samples,
        "device": f"{device.platform} {device.device_kind}",
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "kernels": device.platform == "cpu" and kernels.usable(),
    }


def saved_plan(about: dict[str, Any]) -> Plan | None:
    """The saved plan for the same structure, device and versions, or None.

    A file that is damaged is told once, and counts as none: the plan is made anew.
    """
    path = Plan(about, (), (0.0, 0.0), ()).path
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        seconds, prior = (np.array(found[name], float) for name in ("seconds", "prior"))
        fits = found["about"] == about and len(seconds) == len(about["options"])
        if not fits or prior.shape != (2,) or not (np.isfinite(seconds) & (seconds > 0)).all():
            raise ValueError("its figures are not those of this model")
        candidates = tuple(Candidate(**one) for one in found["candidates"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"the plan {path} cannot be used ({error}); a new one is made", stacklevel=2)
        return None
    return Plan(about, tuple(seconds.tolist()), (float(prior[0]), float(prior[1])), candidates)


def read_plan(about: dict[str, Any]) -> Learned | None:
    """What decoding starts with by a saved plan, or None."""
    plan = saved_plan(about)
    if plan is None:
        return None
    return Learned(np.array(plan.seconds), np.array(plan.prior), 0.0, judged=np.full(2, np.inf))
