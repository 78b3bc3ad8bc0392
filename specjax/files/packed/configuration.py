"""What a folder says about packed weights, before it is known what that means.

Most folders say nothing, so the formats are imported only where one is named.
"""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

from specjax._internal.fields import OBJECT
from specjax.files.folder import CONFIG, OTHER_FORM, named, read_json
from specjax.models import NESTED, Config

if TYPE_CHECKING:
    from specjax.files.packed.scheme import Scheme

_FIELDS = ("quantization_config", "compression_config")
_MODELOPT = "hf_quant_config.json"


def read_scheme(folder: pathlib.Path, config: Config) -> Scheme | None:
    """Returns what a folder says about packed weights; None: it says that it has none.

    Raises:
      ValueError: it has a format, or a field, that is not supported; the message has the cure.
    """
    fields, where = described(folder, config)
    if not fields:
        return None
    from specjax.files.packed.scheme import scheme_of  # imports every format

    return scheme_of(fields, folder, where)


def described(folder: pathlib.Path, config: Config) -> tuple[Any, str]:
    """Returns the fields that describe packed weights, if there are some, and the file with them.

    Raises ValueError if a file cannot be read.
    """
    fields = _fields(config)
    if fields is not None or not (folder / _MODELOPT).exists():
        return fields, CONFIG
    outer = read_json(folder / _MODELOPT)
    with named(folder / _MODELOPT, OTHER_FORM):
        inner = OBJECT.of("quantization", outer.get("quantization") or {})
    return {"quant_method": "modelopt", **inner}, _MODELOPT


def quantisation_of(config: Config) -> Config | None:
    """Returns what a configuration that was read says about packed weights."""
    fields = _fields(config)
    return fields if isinstance(fields, dict) else None


def unquantised(config: Config) -> Config:
    """Returns the configuration without what it says about packed weights."""
    made = {name: value for name, value in config.items() if name not in _FIELDS}
    if isinstance(made.get("text_config"), dict):
        inner = made["text_config"]
        made["text_config"] = {n: value for n, value in inner.items() if n not in _FIELDS}
    return made


def _fields(config: Config) -> Any:
    kind = config.get("model_type")
    inner = config.get("text_config") if isinstance(kind, str) and kind in NESTED else None
    for place in (config, inner if isinstance(inner, dict) else {}):
        for name in _FIELDS:
            if place.get(name):
                return place[name]
    return None
