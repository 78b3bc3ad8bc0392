"""The names that files give to the layer of multi-token prediction (MTP) beside a model's layers.

All names are without a leading "model.".  Reference: Gloeckle et al. 2024, arXiv 2404.19737; the
form that these files have is that of DeepSeek V3, arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from specjax.models.config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class MtpNames:
    """The names of the tensors of MTP layer k, and the switches in which publishers differ.

    In a name, `{k}` stands for the number of the MTP layer from 0, and `{layer}` for the number of
    the model's layers and k together.
    """

    block: str  # the beginning of the names of the decoder layer's own tensors
    project: str  # the matrix from [embedding, hidden state] to a hidden state
    embedding_norm: str
    hidden_norm: str
    norm: str | None  # before the head; None: the layer's output is not normed
    field: str  # of config.json, with the number of MTP layers
    others: tuple[str, ...] = ()  # beginnings of copies of the target's tables, which are not read
    # The beginning of the names of the feed-forward part, where the target has it in layers of its
    # own, and the MTP layer in a block of its own.
    mlp_block: str | None = None
    hidden_first: bool = False  # the matrix reads [hidden state, embedding]
    is_dense: bool = False  # the decoder layer has an MLP also in models whose layers have experts

    def name(self, part: str, layers: int, k: int) -> str:
        """Returns the name in the field `part`, for MTP layer k of a model of `layers` layers."""
        return getattr(self, part).format(k=k, layer=layers + k)


MTP: dict[str, MtpNames] = {
    "qwen": MtpNames(
        block="mtp.layers.{k}.",
        project="mtp.fc.weight",
        embedding_norm="mtp.pre_fc_norm_embedding.weight",
        hidden_norm="mtp.pre_fc_norm_hidden.weight",
        norm="mtp.norm.weight",
        field="mtp_num_hidden_layers",
    ),
    "deepseek": MtpNames(
        block="layers.{layer}.",
        project="layers.{layer}.eh_proj.weight",
        embedding_norm="layers.{layer}.enorm.weight",
        hidden_norm="layers.{layer}.hnorm.weight",
        norm="layers.{layer}.shared_head.norm.weight",
        field="num_nextn_predict_layers",
        others=("layers.{layer}.shared_head.head.", "layers.{layer}.embed_tokens."),
    ),
    "ernie": MtpNames(
        block="mtp_block.{k}.",
        project="mtp_linear_proj.{k}.weight",
        embedding_norm="mtp_emb_norm.{k}.weight",
        hidden_norm="mtp_hidden_norm.{k}.weight",
        norm=None,
        field="num_nextn_predict_layers",
        is_dense=True,
    ),
    "mimo": MtpNames(
        block="mtp_layers.{k}.",
        project="mtp_layers.{k}.input_proj.weight",
        embedding_norm="mtp_layers.{k}.token_layernorm.weight",
        hidden_norm="mtp_layers.{k}.hidden_layernorm.weight",
        norm="mtp_layers.{k}.final_layernorm.weight",
        field="num_nextn_predict_layers",
        hidden_first=True,
    ),
    "nemotron": MtpNames(
        block="mtp.layers.0.",
        mlp_block="mtp.layers.1.",
        project="mtp.layers.0.eh_proj.weight",
        embedding_norm="mtp.layers.0.enorm.weight",
        hidden_norm="mtp.layers.0.hnorm.weight",
        norm="mtp.layers.1.final_layernorm.weight",
        field="num_nextn_predict_layers",
    ),
}
"""The publishers' layouts, by name."""

_MOST = 64  # MTP layers that are looked for


def mtp_layout(names: Iterable[str], layers: int) -> tuple[str, int] | None:
    """Returns the layout of the MTP layers among some tensors, and their number; None: none.

    Args:
      names: of the tensors, with or without a leading "model.".
      layers: the number of the model's own layers.

    Example:
      >>> mtp_layout(["model.layers.2.eh_proj.weight", "model.norm.weight"], layers=2)
      ('deepseek', 1)
    """
    known = {name.removeprefix("model.") for name in names}
    for layout, own in MTP.items():
        found = [own.name("project", layers, k) in known for k in range(_MOST)]
        if "{" not in own.project:  # one matrix, whatever the number of decoder layers
            found = found[:1]
        if found[0]:
            return layout, found.index(False) if False in found else len(found)
    return None


def mtp_beginnings(names: Iterable[str], layers: int) -> tuple[str, ...]:
    """Returns beginnings of the names of all MTP tensors among some tensors; () if there are none.

    The arguments are those of `mtp_layout`.
    """
    names = tuple(names)
    found = mtp_layout(names, layers)
    if found is None:
        return ()
    own = MTP[found[0]]
    parts = [own.block, own.mlp_block, own.project, own.embedding_norm, own.hidden_norm, own.norm]
    parts += own.others
    begin = {part.format(k=k, layer=layers + k) for part in parts if part for k in range(found[1])}
    return (*begin, *(f"model.{each}" for each in begin))


def mtp_layers(target: TransformerConfig, is_dense: bool = False) -> TransformerConfig:
    """Returns the configuration of a target's MTP layer: that of its last layer with attention.

    Args:
      target: the configuration of the target.
      is_dense: the layer has an MLP, also if that of the target has experts.

    Raises:
      ValueError: the target has no layer with attention, or embeddings of another size than its
        hidden states.
    """
    if target.embedding_size is not None:
        raise ValueError(
            f"a layer of multi-token prediction reads embeddings of the target's hidden size "
            f"{target.hidden_size}, and those of the target have {target.embedding_size} numbers"
        )
    if splits_layers(target):
        return _joined(target)
    own = [
        i
        for i in range(target.num_layers)
        if not target.has_state(i) and target.owner_of(i) == i and target.branch_of(i) == "both"
    ]
    if not own:
        raise ValueError(
            "a layer of multi-token prediction is one with attention and a feed-forward part, and "
            "the target has none: pass a drafter of another kind"
        )
    sparse = [i for i in own if target.is_sparse(i)]
    one = target.keep([(own if is_dense or not sparse else sparse)[-1]])
    one = dataclasses.replace(one, per_layer_size=0, tied_embeddings=False, exact_states=False)
    if is_dense and target.num_experts:
        one = dataclasses.replace(one, num_experts=0, shared_size=0, shared_gate=False, sparse=())
    return one


def splits_layers(target: TransformerConfig) -> bool:
    """Returns whether attention and feed-forward parts are layers of their own, as in Nemotron."""
    kinds = {target.branch_of(i) for i in range(target.num_layers)}
    attends = any(_attends(target, i) for i in range(target.num_layers))
    return "both" not in kinds and "mlp" in kinds and attends


def _attends(target: TransformerConfig, layer: int) -> bool:
    """Returns whether a layer has attention, and no feed-forward part."""
    is_mixer = target.branch_of(layer) == "mixer"
    return is_mixer and not target.has_state(layer) and target.mixer_of(layer) is None


def _joined(target: TransformerConfig) -> TransformerConfig:
    """Returns the last layer with attention, and the last with experts or an MLP, as one layer."""
    every = range(target.num_layers)
    feeds = [i for i in every if target.branch_of(i) == "mlp"]
    sparse = [i for i in feeds if target.is_sparse(i)]
    one = target.keep([(sparse or feeds)[-1]])
    return dataclasses.replace(
        one, branches=(), mixers=(), tied_embeddings=False, exact_states=False
    )
