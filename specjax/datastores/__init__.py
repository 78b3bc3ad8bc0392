"""Datastores: corpora in which a proposer looks up the continuations of the last tokens.

The method is `specjax.methods.datastore`; this module exports the functions that make, read and
write one.
"""

from specjax.methods import (
    Datastore,
    DatastoreDrafter,
    Predicted,
    describe_datastore,
    load_datastore,
    predict_size,
    save_datastore,
    text_files,
)

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
