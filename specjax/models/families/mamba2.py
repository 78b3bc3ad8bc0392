"""What the families with Mamba2 layers share: names of tensors, and the limits of the time step."""

from __future__ import annotations

import math

from specjax._internal.fields import LIST, as_json
from specjax.models.families.family import Config, Tensor
from specjax.models.families.fused import convolution, divided
from specjax.models.families.llama import dense
from specjax.models.mixers import Mamba2

KINDS = {
    "mamba": True,
    "linear_attention": True,
    "attention": False,
    "full_attention": False,
}
"""Names of kinds of layers: whether they are Mamba2.  Files of transformers 4 have the first."""


def check_limit(config: Config) -> None:
    """Raises ValueError unless `time_step_limit` leaves all steps as they are.

    transformers writes an infinite number as an object.
    """
    found = config.get("time_step_limit")
    if found is None:
        return
    LIST.of("time_step_limit", found)
    ends = [end.get("__float__") if isinstance(end, dict) else end for end in found]
    most = ends[-1] if ends else None
    unlimited = most == math.inf or str(most).lower() in ("infinity", "inf")
    if len(ends) != 2 or ends[0] != 0 or not unlimited:
        raise ValueError(
            f"time_step_limit={as_json(found)} is not supported for {config['model_type']}; "
            "specjax has [0, infinity]"
        )


def mamba_tensors(m: Mamba2, theirs: str, ours: tuple[str, ...], width: int) -> list[Tensor]:
    """Returns the tensors of a Mamba2 layer that reads `width` numbers."""
    projected = {"z": m.size, **m.convolved, "dt": m.heads}
    rows = divided(f"{theirs}.in_proj", ours, projected, width, m.bias)
    rows += convolution(f"{theirs}.conv1d", ours, m.convolved, m.conv_size, m.conv_bias)
    rows += [Tensor(f"{theirs}.{name}", (*ours, name)) for name in ("A_log", "dt_bias", "D")]
    if m.norm is not None:
        rows.append(Tensor(f"{theirs}.norm.weight", (*ours, "norm")))
    return rows + dense(f"{theirs}.out_proj", (*ours, "o"), m.out_bias)
