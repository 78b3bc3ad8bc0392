"""Datastores: corpora in which a proposer looks up what followed the last tokens."""

from specjax.datastores.drafter import DatastoreDrafter
from specjax.datastores.folder import describe_datastore, load_datastore, save_datastore
from specjax.datastores.inputs import Predicted, predict_size, text_files
from specjax.datastores.record import Datastore

__all__ = [
    "Datastore",
    "DatastoreDrafter",
    "Predicted",
    "describe_datastore",
    "load_datastore",
    "predict_size",
    "save_datastore",
    "text_files",
]
