"""The module of each mixer's record."""

from __future__ import annotations

from flax import linen as nn

from specjax.models.config import Mixer
from specjax.models.mixers.gated_delta import GatedDelta, GatedDeltaNet
from specjax.models.mixers.kimi_delta import KimiDelta, KimiDeltaNet
from specjax.models.mixers.latent import Latent, LatentAttention
from specjax.models.mixers.mamba2 import Mamba2, Mamba2Layer
from specjax.models.mixers.short_conv import GatedShortConv, ShortConv

MIXERS: dict[type[Mixer], type[nn.Module]] = {
    GatedDelta: GatedDeltaNet,
    KimiDelta: KimiDeltaNet,
    Latent: LatentAttention,
    Mamba2: Mamba2Layer,
    ShortConv: GatedShortConv,
}
"""The record of a mixer -> its module, which is called as `models.mixers.attention.Attention`."""
