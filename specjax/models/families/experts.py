"""Fields and tensors of mixtures of experts that several families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Tensor
from specjax.models.families.fields import check_sizes, given
from specjax.models.families.llama import dense, llama_tensors

FUSED = ".experts.gate_up_proj"
"""The end of the name of a tensor with two matrices of every expert."""


@dataclasses.dataclass(frozen=True)
class ExpertNames:
    """The names of a sparse layer's tensors, after that of the layer."""

    block: str = "mlp"
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # of an expert
    correction: str = "gate.e_score_correction_bias"
    correction_axes: int = 1  # of that tensor, of which the last has the experts
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"


def sparse_tensors(
    c: TransformerConfig,
    names: ExpertNames,
    mixers: Callable[[TransformerConfig, int], list[Tensor]] | None = None,
) -> list[Tensor]:
    """Returns the tensors of `llama_tensors`, with those of corrected routers and shared experts.

    Such a router stays in float32: its corrections differ by less than bfloat16 resolves.
    """
    rows = llama_tensors(c, experts=names.block, expert_parts=names.parts, mixers=mixers)
    if c.router.corrected:
        rows = [
            dataclasses.replace(row, wide=True) if row.path[-2:-1] == ("router",) else row
            for row in rows
        ]
    for i in filter(c.is_sparse, range(c.num_layers)):
        theirs, ours = f"model.layers.{i}.{names.block}", (f"layer_{i}", "mlp")
        if c.router.corrected:
            shape = (*[1] * (names.correction_axes - 1), c.num_experts)
            there = f"{theirs}.{names.correction}"
            rows.append(Tensor(there, (*ours, "correction"), shape=shape, wide=True))
        parts = ("gate", "up", "down") if c.gated else ("up", "down")
        for part in parts if c.shared_size else ():
            there = f"{theirs}.{names.shared}.{part}_proj"
            rows += dense(there, (*ours, "shared", part), c.mlp_bias)
        if c.shared_gate:
            rows += dense(f"{theirs}.{names.shared_gate}", (*ours, "shared_gate"), False)
    return rows


def fused_experts(
    rows: list[Tensor], c: TransformerConfig, inputs_first: bool = False
) -> list[Tensor]:
    """Returns a table in which one tensor holds gate and up of all experts, and another down.

    Args:
      rows: the table with a tensor for each matrix of each expert.
      c: the configuration.
      inputs_first: the matrices are [in, out], as in Llama 4, and not [out, in].
    """
    places = {"gate": slice(c.expert_size), "up": slice(c.expert_size, None)}
    sizes = (2 * c.expert_size, c.hidden_size)[:: -1 if inputs_first else 1]
    shape = (c.num_experts, *sizes)
    made = []
    for row in rows:
        if row.at is None or row.path[-2] != "mlp":
            made.append(row)
        elif row.at == 0:
            block, part = row.name.split(".experts.")[0], row.path[-1]
            name, turned = f"{block}.experts.down_proj", not inputs_first
            whole = dataclasses.replace(row, name=name, at=None, transpose=turned)
            if part in places:
                index = (..., places[part]) if inputs_first else (slice(None), places[part])
                name = f"{block}{FUSED}"
                whole = dataclasses.replace(whole, name=name, shape=shape, index=index)
            made.append(whole)
    return made


def sparse_in_turn(config: Config) -> tuple[bool, ...]:
    """Returns the layers that have experts, as `decoder_sparse_step` and `mlp_only_layers` say.

    The result is () if all have.
    """
    check_sizes(config, optional=("decoder_sparse_step",))
    step, plain = given(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    layers = range(config["num_hidden_layers"])
    sparse = tuple(i not in plain and (i + 1) % step == 0 for i in layers)
    return () if all(sparse) else sparse


def plain_layers(c: TransformerConfig) -> list[int]:
    """Returns the layers that have an MLP instead of experts."""
    return [i for i in range(c.num_layers) if not c.is_sparse(i)]


def plain_before(c: TransformerConfig) -> int:
    """Returns the number of layers with an MLP, all of which must stand before those with experts.

    Raises:
      ValueError: a layer with an MLP stands behind one with experts.
    """
    plain = plain_layers(c)
    if plain != list(range(len(plain))):
        raise ValueError(
            f"layers {plain} of {c.num_layers} have no experts; files of {c.family} can only say "
            "that the first layers have none"
        )
    return len(plain)
