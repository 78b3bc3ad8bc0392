"""Multi-token prediction (MTP): network, sources and files of a target's own layers."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.methods.mtp.network import Mtp, MtpConfig, mtp_shapes
    from specjax.methods.mtp.reader import MTP_FORMAT, NUM_DRAFTS, with_switches
    from specjax.methods.mtp.several import MtpLayersSource, part_name
    from specjax.methods.mtp.source import MtpSource

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "MTP_FORMAT",
    "NUM_DRAFTS",
    "Mtp",
    "MtpConfig",
    "MtpLayersSource",
    "MtpSource",
    "mtp_shapes",
    "part_name",
    "with_switches",
]
