"""Reads the configuration of a model's folder, by its family.

Code from a folder is never executed.  `auto_map` names classes of the folder's own code.  If
specjax has the model's family, and the class has the name of the family's class, the weights are
read without that code.
"""

from __future__ import annotations

import dataclasses
import pathlib
import warnings

from specjax._internal.checks import reworded, shown
from specjax._internal.fields import one_of
from specjax.files.folder import (
    CONFIG,
    INDEX,
    SINGLE,
    file_of,
    named,
    read_json,
    weight_files,
)
from specjax.files.headers import equal, open_tensors
from specjax.files.packed import read_scheme
from specjax.files.tensors import rows_of
from specjax.models import FAMILIES, NESTED, Config, Family, TransformerConfig, check_fields


def read_config(folder: pathlib.Path) -> tuple[Config, Family, TransformerConfig]:
    """Returns a folder's `config.json`, its family, and the family's reading of it.

    The fields of a GGUF file, or of one in the folder, take the place of `config.json`.

    Where the file says that the output matrix is the embedding, and the weights hold another output
    matrix, the weights count, as in transformers: there is a warning, and `tie_word_embeddings` is
    false in the result.

    Raises:
      ValueError: a field is missing, or its value is not supported.
    """
    packed = file_of(folder)
    file = folder / CONFIG if packed is None else packed
    if packed is None:
        config = read_json(file)
    else:
        from specjax.files import gguf

        config = gguf.configuration_of(packed)
    family = _family(folder, config)
    with named(file):
        check_fields(config)
        kind = config["model_type"]
        with reworded(f"{file} lacks ", f", which a {kind} model needs", (KeyError,)):
            ours = family.read_config(config)
    if (
        packed is None
        and ours.tied_embeddings
        and (head := _head_of_its_own(folder, family, ours)) is not None
    ):
        warnings.warn(
            f"{file} says that the output matrix is the embedding (tie_word_embeddings), and the "
            f"weights hold another {head}: it is read as a matrix of its own. Set "
            "tie_word_embeddings to false in the file, or remove the tensor if it is a leftover",
            stacklevel=2,
        )
        config = {**config, "tie_word_embeddings": False}
        ours = dataclasses.replace(ours, tied_embeddings=False)
    return config, family, ours


def _head_of_its_own(folder: pathlib.Path, family: Family, config: TransformerConfig) -> str | None:
    """Returns the name of a stored output matrix that differs from the stored embedding, or None.

    A folder without weights has none.
    """
    if not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        return None
    stored, _ = open_tensors(weight_files(folder))
    # One layer's names are enough, and a damaged configuration may have very many.
    untied = dataclasses.replace(config.truncated(1), tied_embeddings=False)
    names = {row.path[0]: row.name for row in rows_of(family, untied, stored)}
    head, embedding = stored.get(names["head"]), stored.get(names["embedding"])
    if head is None or embedding is None or equal(head, embedding):
        return None
    return names["head"]


def _family(folder: pathlib.Path, config: Config) -> Family:
    kind, code = config.get("model_type"), config.get("auto_map") or {}
    read_scheme(folder, config)
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if isinstance(kind, str) and kind in NESTED:
        with named(folder / CONFIG):
            family = NESTED[kind].family(config, FAMILIES)
    named_class = code.get("AutoModelForCausalLM") if isinstance(code, dict) else code
    plain = None if family is None else family.architecture
    if named_class and str(named_class).rpartition(".")[2] != plain:
        raise ValueError(
            f"{folder / CONFIG} needs code of its own (auto_map names {shown(named_class)}); "
            "specjax never executes code from a folder. If the weights are those of a plain "
            "model_type, remove auto_map from the file"
        )
    with named(folder / CONFIG):
        one_of(sorted({*FAMILIES, *NESTED})).of("model_type", kind)
    assert family is not None
    return family


def text_config(config: Config) -> Config:
    """Returns the configuration of the text model: of a folder of several models, or the whole."""
    nested = NESTED.get(str(config.get("model_type")))
    return config if nested is None else nested.text(config)
