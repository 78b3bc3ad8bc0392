"""Datastores: corpora in which a proposer looks up what followed the last tokens.

The method is `specjax.methods.datastore`; this module names what makes, reads and writes one.
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
