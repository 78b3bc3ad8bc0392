"""Reads a class of options from a command line with tyro, and shows its help in groups."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar

from specjax.options.compiled import keep_compiled
from specjax.options.exits import ending, open_streams, say
from specjax.options.fields import Options, option
from specjax.options.files import arguments_of_files
from specjax.parallel import join_from, leaving

T = TypeVar("T", bound=Options)


@dataclasses.dataclass(frozen=True)
class FileOptions(Options):
    """The options that every command has, which are read before the others."""

    group = "file"

    config: str | None = option(
        None,
        "a YAML, TOML or JSON file of options, such as a recipe; --set and the command line "
        "override it",
    )
    set: tuple[tuple[str, ...], ...] = option(
        (), "options as in such a file: steps=2, remat=true, data=[a, b]",
        metavar="KEY=VALUE [KEY=VALUE ...]", repeated=True,
    )  # fmt: skip


def parse(
    cls: type[T],
    argv: list[str] | None = None,
    description: str | None = None,
    prog: str | None = None,
) -> T:
    """Reads `cls` from a command line.

    Options of the command line override those of `--set`, which override those of `--config`.  A
    `ValueError` of a check becomes a usage error.
    """
    prog = prog or pathlib.Path(sys.argv[0]).name
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)  # what follows are no options
    asks = {"-h", "--help", "--help-all"} & set(argv[:end])
    if asks:
        _show_help(cls, prog, description, whole="--help-all" in asks)
    try:
        read, rest = _tyro(
            _groups(FileOptions), prog, argv[:end], add_help=False, return_unknown_args=True
        )
        files = _flat(read)
        settings = [text for some in files["set"] for text in some]
        given = arguments_of_files(cls, files["config"], settings)
        values = _flat(_tyro(_groups(cls), prog, [*given, *rest, *argv[end:]]))
        # Processes must join before JAX is first used, which the checks of the options may do.
        join_from(values)
        return cls(**values)
    except (ValueError, OSError) as error:
        say(f"{prog}: error: {error}")
        sys.exit(2)


def run(main: Callable[[], None]) -> None:
    """Runs a job from the command line, which ends as in `exits.ending`."""
    open_streams()
    keep_compiled()
    with leaving(), ending(pathlib.Path(sys.argv[0]).stem):
        main()


def _show_help(cls: type[Options], prog: str, description: str | None, whole: bool) -> None:
    """Prints the help, and ends the process."""
    names = {field.name for field in dataclasses.fields(cls)}
    hidden = set() if whole or not cls.common else names - set(cls.common)
    try:
        text = (description or "").strip()
        _tyro({**_groups(cls, hidden), **_groups(FileOptions)}, prog, ["--help"], description=text)
    finally:
        if hidden:
            print(f"--help-all shows {len(hidden)} more options.")


def _flat(groups: object) -> dict[str, Any]:
    """Returns the options of all groups by name."""
    return {name: value for group in vars(groups).values() for name, value in vars(group).items()}


def _tyro(groups: Mapping[str, type], prog: str, argv: list[str], **settings: Any) -> Any:
    """Calls `tyro.cli`, which ends the process with a message for what it cannot read."""
    import tyro

    marks = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)
    options = dataclasses.make_dataclass("options", groups.items())
    return tyro.cli(options, prog=prog, args=argv, config=marks, **settings)


def _groups(cls: type[Options], hidden: Collection[str] = ()) -> dict[str, type]:
    """Returns a dataclass for each group of options, since tyro shows nested classes as groups."""
    hints, groups = typing.get_type_hints(cls), dict[str, list[tuple[str, Any, Any]]]()
    for field in dataclasses.fields(cls):
        if field.name not in hidden:
            default = dataclasses.field(default=field.default)
            row = (field.name, _annotated(hints[field.name], field), default)
            groups.setdefault(_first_owner(cls, field.name).group, []).append(row)
    return {
        name: dataclasses.make_dataclass(name, rows, kw_only=True, namespace={"__doc__": ""})
        for name, rows in groups.items()
    }


def _first_owner(cls: type[Options], name: str) -> type[Options]:
    """Returns the class that adds this option; others may change its default."""
    bases = [base for base in reversed(cls.__mro__) if issubclass(base, Options)]
    return next(
        base for base in bases if name in {field.name for field in dataclasses.fields(base)}
    )


def _annotated(kind: Any, field: dataclasses.Field[Any]) -> Any:
    """Returns the type of an option with its help, as tyro reads them."""
    import tyro

    settings, default = field.metadata, field.default
    if settings["choices"]:
        kind = _with_choices(kind, Literal[tuple(settings["choices"])])
    says = not (default is None or default is False or default in ((), "", dataclasses.MISSING))
    marks = [
        tyro.conf.arg(
            help=settings["help"], aliases=settings["names"], metavar=settings["metavar"],
            help_behavior_hint=(lambda text: f"(default: {text})") if says else "",
        )
    ]  # fmt: skip
    places = [tyro.conf.Positional, tyro.conf.PositionalMetavarFromFieldName]
    marks += places if settings["positional"] else []
    marks += [tyro.conf.UseAppendAction] if settings["repeated"] else []
    return Annotated[(kind, *marks)]


def _with_choices(kind: Any, choices: Any) -> Any:
    """Returns the type `str`, `str | None` or `tuple[str, ...]` with choices instead of `str`."""
    if isinstance(kind, types.UnionType):
        return choices | None
    return tuple[choices, ...] if typing.get_origin(kind) is tuple else choices
