"""Configurations of students that have the family of another model.

A student is written as a folder of its family.  So its configuration must be one that the family's
config.json can say: `written` checks this by writing it and reading it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from specjax._internal.checks import reworded
from specjax.models import FAMILIES, TransformerConfig

_DERIVED = ("embedding_scale",)
"""The fields that a family computes from other fields."""


def alike(
    sizes: Mapping[str, int | None],
    config: TransformerConfig,
    vocab_size: int,
    context: int,
    name: str,
) -> TransformerConfig:
    """Returns a configuration of the same family with other sizes.

    With another hidden size, MLPs, experts and the number of heads are scaled with it, unless they
    are asked for; a head keeps its size.  More layers repeat the kinds of layers
    from the first, but not dense layers before experts.

    Args:
      sizes: the requested sizes by name; None: the size of that configuration.
      config: of the model that the student is like.
      vocab_size, context: of the student, which should read so many tokens.
      name: of the option that names the model, for messages.

    Raises:
      ValueError: the family has no model of these sizes; the message has the cure.
    """
    hidden = sizes["hidden_size"] or config.hidden_size
    scale = hidden / config.hidden_size
    # In some families the heads make up the hidden size, and config.json has no size of a head.
    divided = config.num_heads * config.head_dim == config.hidden_size and not config.mixers
    heads, head_dim = sizes["num_heads"], config.head_dim
    if heads is None:
        heads = max(1, hidden // head_dim if divided else round(config.num_heads * scale))
    if divided:
        head_dim = hidden // heads
        if heads * head_dim != hidden:
            raise ValueError(
                f"{name}: a {config.family} model of hidden size {hidden} cannot have {heads} "
                f"heads of size {head_dim}: pass a --num-heads that divides --hidden-size"
            )
    most = max(1, round(config.num_kv_heads * heads / config.num_heads))
    divisors = [n for n in range(1, most + 1) if heads % n == 0]
    layers = range(sizes["num_layers"] or config.num_layers)
    # A new table of learned positions may have any length.
    positions = stretched(config, context).max_positions
    if config.position_offset is not None:
        positions = max(context, config.max_positions)
    expert = _scaled(config.expert_size, scale) if config.num_experts else 0
    own = [_repeated(config, i) for i in layers]

    def made(chosen: list[int]) -> TransformerConfig:
        wanted = config.keep(chosen)
        return written(
            dataclasses.replace(
                wanted,
                vocab_size=vocab_size,
                hidden_size=hidden,
                mlp_size=sizes["mlp_size"] or _scaled(config.mlp_size, scale),
                expert_size=expert,
                shared_size=config.shared_size * expert // max(config.expert_size, 1),
                num_heads=heads,
                num_kv_heads=sizes["num_kv_heads"] or divisors[-1],
                head_dim=head_dim,
                max_positions=positions,
                mixers=tuple(mixer and mixer.resized(hidden) for mixer in wanted.mixers),
            ),
            name,
        )

    try:
        return made(own)
    except ValueError as error:
        try:  # files of Gemma 4 can only say that the last layer is one like the model's last
            return made([*own[:-1], config.num_layers - 1])
        except ValueError:
            raise ValueError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from None


def _repeated(config: TransformerConfig, layer: int) -> int:
    """Returns the layer of a model whose kind layer `layer` of a longer student has.

    Dense layers before layers that all have experts are not repeated.
    """
    sparse = [config.is_sparse(i) for i in range(config.num_layers)]
    first = sparse.index(True) if True in sparse else 0
    if not all(sparse[first:]):
        first = 0
    return layer if layer < first else first + (layer - first) % (config.num_layers - first)


def _scaled(size: int, scale: float) -> int:
    """Returns a size in proportion, as a multiple of 8 that hardware multiplies fast."""
    return size if scale == 1 else max(8, round(size * scale / 8) * 8)


def cut(config: TransformerConfig, layers: Sequence[int], name: str) -> TransformerConfig:
    """Returns the configuration of some layers of a model."""
    missing = [layer for layer in layers if layer >= config.num_layers]
    if missing:
        raise ValueError(
            f"{name} has layers 0 to {config.num_layers - 1}, and no layer {missing[0]}: "
            "name others"
        )
    return written(config.keep(layers), name)


def stretched(config: TransformerConfig, context: int) -> TransformerConfig:
    """Returns the configuration with `context` tokens, if it is shorter and can be extended.

    Learned positions end with their table, and a RoPE scaling is made for one context length.
    """
    ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
    fixed = config.position_offset is not None or any(
        r and r.kind not in ("default", "none") for r in ropes
    )
    if fixed or config.max_positions >= context:
        return config
    return dataclasses.replace(config, max_positions=context)


def written(config: TransformerConfig, name: str) -> TransformerConfig:
    """Returns the configuration that its folder will describe."""
    family = FAMILIES[config.family]
    with reworded(f"{name}: "):
        read = family.read_config(family.write_config(config))
    for field in dataclasses.fields(config):
        asked, said = vars(config)[field.name], vars(read)[field.name]
        if asked != said and field.name not in _DERIVED:
            raise ValueError(
                f"{name}: the config.json of a {config.family} model cannot say that "
                f"{field.name} is {asked} (it would be read as {said}): choose other layers or "
                "sizes"
            )
    return read
