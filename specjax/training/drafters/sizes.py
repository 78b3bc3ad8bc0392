"""The options from which the sizes of a new drafter follow, and layers of these sizes."""

from __future__ import annotations

import dataclasses

from specjax.models import Rope, TransformerConfig
from specjax.options.fields import Options, count, option


@dataclasses.dataclass(frozen=True)
class Sizes(Options):
    """The options of a drafter's network."""

    group = "drafter"

    num_drafts: int = count(7, "depth of the drafts that are learned")
    num_layers: int | None = count(
        None, "layers; by default 1 for eagle3 and mtp, and 2 for the other kinds"
    )
    mlp_size: int | None = count(None, "hidden size of the MLP; by default the target's")
    taps: tuple[int, ...] = option(
        (),
        "layers of the target whose outputs are read: 0 is the embedding, and i the output of "
        "layer i; by default three (eagle3, peagle) or five, from low to high",
    )
    own_head: bool | None = option(
        None,
        "train an output matrix of the drafter's own instead of using the target's; by default for "
        "eagle3 and peagle only",
    )
    draft_vocab_size: int = count(
        0, "know only so many tokens, the most frequent ones of --data; 0: all of the target's", 0
    )
    markov_rank: int = count(256, "rank of the Markov head of dspark; 0: none", 0)
    markov_head: str = option("vanilla", "kind of that head", choices=("vanilla", "gated", "rnn"))
    confidence: bool = option(True, "dspark also learns to estimate its acceptance")


def units_of(options: Sizes, target: TransformerConfig) -> int:
    """Returns U, the number of tokens that the drafter knows."""
    return options.draft_vocab_size or target.vocab_size


def owns_head(options: Sizes, default: bool) -> bool:
    """Returns whether the drafter has its own head, which a reduced vocabulary needs."""
    if options.draft_vocab_size:
        return True
    return default if options.own_head is None else options.own_head


def layers_like(
    target: TransformerConfig, num_layers: int, mlp_size: int | None, family: str
) -> TransformerConfig:
    """Returns layers of the sizes of the target's, in the form of Llama or Qwen3.

    These are the forms that published drafters have, whatever the family of their target: "llama",
    or "qwen3", which normalises queries and keys.
    """
    rope = target.rope_of(0)
    return TransformerConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.embedding_size or target.hidden_size,
        mlp_size=mlp_size or target.mlp_size,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_positions=target.max_positions,
        # Published layouts have no partial rotations, and no queries that grow.
        rope=dataclasses.replace(rope, growth=0.0) if rope and rope.fraction == 1 else Rope(),
        norm_eps=target.norm_eps,
        qk_norm="head" if family == "qwen3" else None,
        family=family,
    )
