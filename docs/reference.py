"""The pages of the reference: every public name, once, with its docstring.

The names are read from the source, and not by importing it: `__all__` of `specjax`, of each of its
rooms that is a folder, and what the rooms that are files define.
"""

from __future__ import annotations

import ast
import functools
import itertools
import pathlib

ROOT = pathlib.Path(__file__).parent.parent / "specjax"

_FILES = ("plot", "processors", "sampling", "tree", "types")
"""Rooms that are files and have names for users; other files serve the library itself."""

_INTERNAL = ("specjax._internal", "specjax.cli", "specjax.options")
"""What serves the library itself, and the command line, which `specjax <command> --help`
documents."""


def public(module: str) -> list[str]:
    """The public names of a module: its `__all__`, or what it defines without an underscore."""
    body = _tree(module).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    defined = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [name for name in defined if not name.startswith("_")]


def origins(module: str) -> dict[str, str]:
    """The full name under which each public name of a folder's `__init__` is defined or passed on.

    For example {"Chain": "specjax.proposers.Chain"} for `specjax`.
    """
    found = {name: f"{module}.{name}" for name in public(module)}
    for node in ast.walk(_tree(module)):  # also below `if TYPE_CHECKING`
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (name := alias.asname or alias.name) in found:
                    found[name] = f"{node.module}.{alias.name}"
    return found


@functools.cache
def rooms() -> list[str]:
    """The public rooms of the library, as module names."""
    folders = sorted(path.parent for path in ROOT.rglob("__init__.py"))
    modules = [".".join(("specjax", *folder.relative_to(ROOT).parts)) for folder in folders]
    named = [f"specjax.{name}" for name in _FILES]
    return [
        module for module in [*modules, *named] if module not in _INTERNAL and module != "specjax"
    ]


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_path(module).read_text())


def _path(module: str) -> pathlib.Path:
    there = ROOT.joinpath(*module.split(".")[1:])
    return there / "__init__.py" if there.is_dir() else there.with_suffix(".py")


@functools.cache
def settled(full: str) -> str:
    """The name under which a public name is defined, through all `__init__` that pass it on."""
    module, _, name = full.rpartition(".")
    if module == "specjax" or _path(module).name == "__init__.py":
        further = origins(module).get(name, full)
        return full if further == full else settled(further)
    return full


def can_be_shown(full: str) -> bool:
    """Does the source define this name by itself?  Names that are assigned together are listed."""
    module, _, name = settled(full).rpartition(".")
    for node in _tree(module).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        names = [getattr(target, "id", getattr(target, "name", None)) for target in targets]
        if name in names:
            return True
    return False


def documented(module: str) -> list[str]:
    """The public names that the page of a module shows in full.

    A name that several modules pass on is shown once: by `specjax`, or else by the first of the
    others.
    """
    before = list(itertools.takewhile(lambda other: other != module, ["specjax", *rooms()]))
    shown = {settled(f"{other}.{name}") for other in before for name in public(other)}
    return [name for name in public(module) if settled(f"{module}.{name}") not in shown]


PAGES = {
    "index" if module == "specjax" else module.removeprefix("specjax."): module
    for module in ["specjax", *rooms()]
    if documented(module)
}
"""Name of a page, and the module that it documents, if any of its names are not on another."""


def markdown_of(module: str) -> str:
    """The page of a module, in Markdown with mkdocstrings' directives.

    A name is given by where it is defined, since `specjax.generate` is a module and a function.
    """
    lines = [f"# {module}", ""]
    docstring = ast.get_docstring(_tree(module)) or ""
    own = documented(module)
    if module == "specjax":
        lines += [
            docstring,
            "",
            "The other pages of this reference are the rooms of the library. [What versions "
            "promise](../changes.md) holds for `specjax` and for the rooms that are named there.",
            "",
        ]
        groups: dict[str, list[str]] = {}
        for name, origin in origins(module).items():
            groups.setdefault(origin.rpartition(".")[0], []).append(name)
        for room, names in groups.items():
            lines += [f"## {room.removeprefix('specjax.').capitalize()}", ""]
            for name in names:
                lines += [f"::: {settled(f'specjax.{name}')}", ""]
        return "\n".join(lines)
    lines += [_indented(docstring), ""]
    elsewhere = [name for name in public(module) if name not in own]
    if elsewhere:
        links = ", ".join(f"[`{name}`][{settled(f'{module}.{name}')}]" for name in elsewhere)
        lines += [f"On other pages: {links}.", ""]
    constants = [name for name in own if not can_be_shown(f"{module}.{name}")]
    if constants:
        lines += [f"Constants: {', '.join(f'`{name}`' for name in constants)}.", ""]
    for name in own:
        if name not in constants:
            lines += [f"::: {settled(f'{module}.{name}')}", ""]
    return "\n".join(lines)


def _indented(docstring: str) -> str:
    """A docstring as Markdown; drawings and tables of text in it stay as they were typed."""
    parts = docstring.split("\n\n")
    return "\n\n".join(
        f"```text\n{part}\n```" if part.startswith(("  ", "\t")) else part for part in parts
    )
