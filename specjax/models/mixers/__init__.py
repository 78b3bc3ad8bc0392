"""The mixers of layers: attention, and what other layers have in its place.

A mixer is a module that reads [B, N, E] and returns [B, N, E], and the layer's cache with the new
tokens staged.  Its record, a `Mixer` in `TransformerConfig.mixers`, has its sizes.
"""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.models.mixers.attention import Attention, AttentionSizes, Rotations
    from specjax.models.mixers.gated_delta import GatedDelta
    from specjax.models.mixers.kimi_delta import KimiDelta
    from specjax.models.mixers.latent import Latent, LatentAttention
    from specjax.models.mixers.mamba2 import Mamba2, Scales
    from specjax.models.mixers.short_conv import ShortConv

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "Attention",
    "AttentionSizes",
    "GatedDelta",
    "KimiDelta",
    "Latent",
    "LatentAttention",
    "Mamba2",
    "Rotations",
    "Scales",
    "ShortConv",
]
