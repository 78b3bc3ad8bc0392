"""Trains a layer of multi-token prediction as it drafts: each depth reads the output before it.

Published layers were trained for one depth, or for a few, and their acceptance falls with the depth
of a draft; training over the depths that are drafted mends that.  The loop is that of EAGLE-3's
"training-time test": Li et al. 2025, arXiv 2503.01840, section 3.2.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from specjax.contract import Weights
from specjax.methods.eagle3.learner import guesses_of
from specjax.methods.mtp.network import Mtp, MtpConfig
from specjax.methods.mtp.source import MtpSource
from specjax.methods.published import SharedParams
from specjax.models import TransformerConfig, mtp_layers
from specjax.training.drafters.learner import Guess, Learner, Lesson
from specjax.training.drafters.sizes import Sizes


@dataclasses.dataclass(frozen=True, eq=False)
class MtpLearner(Learner):
    """Trains a layer: every position of a text trains the first depth, the anchors later ones."""

    source: MtpSource
    depth: int = 7

    def init(self, key: Array) -> Weights:
        c = self.source.network
        pair = jnp.zeros((1, 1, c.layers.hidden_size))
        made = nn.meta.unbox(jax.jit(Mtp(c).init)(key, pair, pair, jnp.zeros((1, 1), jnp.int32)))
        return {"network": made["params"]}

    def guesses(self, params: SharedParams, lesson: Lesson) -> list[Guess]:
        return guesses_of(self.source, params, lesson, self.depth)


def plan_mtp(
    options: Sizes, target: TransformerConfig, taps: tuple[int, ...], mask_token: int
) -> Learner:
    """Plans the learner of a new MTP layer; see `specjax.training.drafters.plan`.

    Raises:
      ValueError: an option of which the form of these layers leaves no choice, or a target without
        a layer that could be copied.
    """
    del taps, mask_token
    fixed = {
        "--num-layers": options.num_layers,
        "--mlp-size": options.mlp_size,
        "--taps": options.taps,
        "--own-head": options.own_head,
        "--draft-vocab-size": options.draft_vocab_size,
    }
    for name, value in fixed.items():
        if value:
            raise ValueError(
                f"{name} is not used by --kind mtp, which is one layer like the target's last "
                f"that reads its last hidden state and uses its output matrix: leave {name} out"
            )
    source = MtpSource(MtpConfig(mtp_layers(target)), target.vocab_size, (target.num_layers + 1,))
    return MtpLearner(
        source=source, objective="forward-kl", decay=0.8, own_head=False, depth=options.num_drafts
    )
