"""`Part`: the base class of the components of a decoder.  Every attribute is declared."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Mapping
from typing import ClassVar, TypeVar

_T = TypeVar("_T")


class _Declared(abc.ABCMeta):
    """Refuses an instance that lacks an attribute declared by its base class without a default, or
    a method that one of its attributes promises."""

    def __call__(cls: type[_T], *arguments: object, **named: object) -> _T:
        made = super().__call__(*arguments, **named)
        declared = [
            name
            for base in cls.__mro__
            if isinstance(base, _Declared)
            for name in inspect.get_annotations(base)
            if name != "PROMISED"
        ]
        missing = sorted({name for name in declared if not hasattr(made, name)})
        if missing:
            raise TypeError(
                f"{cls.__name__} lacks {', '.join(missing)}: give the class that attribute, or set "
                f"it in __post_init__ with self.declare({missing[0]}=...)"
            )
        for base in cls.__mro__:
            for attribute, methods in vars(base).get("PROMISED", {}).items():
                inherited = [name for name in methods if getattr(cls, name) is vars(base)[name]]
                if inherited and vars(made).get(attribute, getattr(cls, attribute)):
                    raise TypeError(
                        f"{cls.__name__} has {attribute}=True and lacks the method "
                        f"{', '.join(inherited)}: define it, or set {attribute}=False"
                    )
        return made


class Part(metaclass=_Declared):
    """A component of a decoder: frozen, hashable, without arrays."""

    # Attribute -> methods.  If the attribute is true, a subclass must override these methods.
    PROMISED: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def declare(self, **attributes: object) -> None:
        """Sets attributes that follow from the fields, in `__post_init__` of a frozen dataclass."""
        for name, value in attributes.items():
            object.__setattr__(self, name, value)
