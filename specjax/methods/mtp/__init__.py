"""Multi-token prediction (MTP): the network, source and files of a target's own drafting layer."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.methods.mtp.network import Mtp, MtpConfig, mtp_shapes
    from specjax.methods.mtp.reader import MTP_FORMAT, NUM_DRAFTS
    from specjax.methods.mtp.source import MtpSource, with_switches

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "MTP_FORMAT",
    "NUM_DRAFTS",
    "Mtp",
    "MtpConfig",
    "MtpSource",
    "mtp_shapes",
    "with_switches",
]
