"""Datastores: corpora in which a proposer looks up the continuations of the last tokens."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.methods.datastore.drafter import DatastoreDrafter
    from specjax.methods.datastore.folder import describe_datastore, load_datastore, save_datastore
    from specjax.methods.datastore.inputs import Predicted, predict_size, text_files
    from specjax.methods.datastore.lookup import DEPTH, DatastoreParams, look_up
    from specjax.methods.datastore.proposer import DatastoreLookup
    from specjax.methods.datastore.record import Datastore
    from specjax.methods.datastore.source import DatastoreSource

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "DEPTH",
    "Datastore",
    "DatastoreDrafter",
    "DatastoreLookup",
    "DatastoreParams",
    "DatastoreSource",
    "Predicted",
    "describe_datastore",
    "load_datastore",
    "look_up",
    "predict_size",
    "save_datastore",
    "text_files",
]
