"""Imports go down only and through the doors of rooms, and docs/rooms.md names the rooms."""

import ast
import graphlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]

# A room is a folder of specjax/ or a file beside the folders. It imports from its own floor and
# from lower ones, and never in a circle.
FLOORS = {
    "foundations": [
        "specjax._internal",
        "specjax.types",
        "specjax.tree",
        "specjax.sampling",
        "specjax.contract",
        "specjax.kernels",
        "specjax.plot",
    ],
    "core": [
        "specjax.caches",
        "specjax.models",
        "specjax.parallel",
        "specjax.text",
        "specjax.constraints",
        "specjax.processors",
        "specjax.rules",
        "specjax.proposers",
        "specjax.decoding",
    ],
    "drafters": [
        "specjax.files",
        "specjax.methods",
        "specjax.drafters",
        "specjax.rounding",
        "specjax.tuning",
        "specjax.measure",
    ],
    "uses": [
        "specjax.generation",
        "specjax.auditing",
        "specjax.datastores",
        "specjax.overlap",
        "specjax.rollouts",
        "specjax.serve",
        "specjax",
    ],
    "doors": [
        "specjax.options",
        "specjax.training",
        "specjax.cli",
        "specjax.__main__",
        "bench",
        "train",
        "experiments",
    ],
}
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS.values()) for room in rooms}
OPEN = {
    "specjax._internal", "specjax.options", "specjax.training", "bench", "train", "experiments",
}  # fmt: skip
"""Rooms without a door: their modules are imported one by one."""

TOPS = ("specjax", "train", "bench", "experiments")

LONG = 700
"""Lines, from which on a file says at its top why it is one thought."""

FILES = sorted(p for top in TOPS for p in (ROOT / top).rglob("*.py"))


def module_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_of(path): path for path in FILES}


def room_of(module: str) -> str:
    top = module.split(".")[0]
    if re.fullmatch(r"specjax\.methods\.\w+\.learner", module):
        return "specjax.training"  # it stands in its method's folder
    return top if top in TOPS[1:] else ".".join(module.split(".")[:2])


def package_of(module: str) -> tuple[str, ...]:
    """The folder that a module is in; for the `__init__` of a folder, that folder itself."""
    parts = tuple(module.split("."))
    return parts if PATHS[module].name == "__init__.py" else parts[:-1]


def imports_of(path: pathlib.Path) -> set[str]:
    """The modules of this project that a file imports anywhere."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full in PATHS else node.module)
    return {name for name in names if name.split(".")[0] in (*TOPS, "tests")}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_go_down(path):
    """Imports lead to rooms on the same floor or on lower ones."""
    module = module_of(path)
    assert room_of(module) in FLOOR, f"{room_of(module)} has no floor: add it to FLOORS"
    for name in imports_of(path):
        assert name in PATHS, f"{module} imports {name}, which is not part of the library"
        assert FLOOR[room_of(name)] <= FLOOR[room_of(module)], (
            f"{module} imports {name}, which is above it"
        )


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_room_is_entered_by_its_door(path):
    """From outside, only a folder's `__init__` is imported, which exports what the folder
    offers."""
    module = module_of(path)
    own = package_of(module)
    for name in imports_of(path):
        there = package_of(name)
        if room_of(name) in OPEN or there == ("specjax",):
            continue
        shared = len([1 for mine, theirs in zip(own, there, strict=False) if mine == theirs])
        # Its own folder and those around it are open; of a folder beside them, only the door.
        through_door = (
            there == tuple(name.split(".")) and len(there) == max(shared, len(there) > 1) + 1
        )
        assert there == own[: len(there)] or through_door, (
            f"{module} imports {name}: import from specjax.{there[1]}, "
            "and let its __init__ export the name"
        )


def acyclic(graph: dict[str, set[str]], name: str) -> None:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"{name} imports in a circle: {' <- '.join(error.args[1])}")


def test_rooms_have_no_cycle():
    graph: dict[str, set[str]] = {room: set() for room in FLOOR}
    for module, path in PATHS.items():
        rooms = {room_of(name) for name in imports_of(path)}
        graph[room_of(module)] |= rooms - {room_of(module)}
    acyclic(graph, "the library")


@pytest.mark.parametrize("room", FLOOR)
def test_a_room_has_no_cycle(room):
    """A module does not import its own room's `__init__` either, since that imports the module."""
    modules = [module for module in PATHS if room_of(module) == room]
    assert modules
    graph = {
        module: {name for name in imports_of(PATHS[module]) if room_of(name) == room}
        for module in modules
    }
    acyclic(graph, room)


def test_the_library_knows_no_training_and_no_nnx():
    """`flax.nnx` has broken with four JAX releases; importing it at package import would break
    specjax too."""
    for path in FILES:
        text = path.read_text()
        if path.is_relative_to(ROOT / "specjax"):
            assert not re.search(r"^\s*(from|import) (train|bench)\b", text, re.MULTILINE), path
            assert not re.search(r"^(from|import) (torch|transformers)\b", text, re.MULTILINE), path
        if path.is_relative_to(ROOT / "specjax") and not path.is_relative_to(
            ROOT / "specjax" / "training"
        ):
            assert not re.search(
                r"^\s*(from|import) (optax|torch|transformers)\b", text, re.MULTILINE
            ), path
            # Modules of an optional extra are imported where they are needed.
            assert not re.search(
                r"^(from|import) (orbax|huggingface_hub|jinja2|outlines_core)\b", text, re.MULTILINE
            ), path
        at_import = [
            node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert not any(re.search(r"flax\b.*\bnnx", ast.unparse(node)) for node in at_import), path


def test_every_file_says_what_it_is_for():
    for path in FILES:
        text = path.read_text()
        assert not text or ast.get_docstring(ast.parse(text)), f"{path} opens without a docstring"
        if len(text.splitlines()) > LONG:
            opening = ast.get_docstring(ast.parse(text)) or ""
            assert "One file:" in opening, f"{path} has over {LONG} lines: say why at its top"


def test_no_module_has_the_name_of_a_public_function():
    """`specjax.tune` is a function; a folder of that name would be hidden by it."""
    public = set(ast.literal_eval(_all_of(PATHS["specjax"])))
    children = {module.split(".")[1] for module in PATHS if module.startswith("specjax.")}
    assert not public & children


def _all_of(path: pathlib.Path) -> ast.expr:
    """The value of `__all__` in a file."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return node.value
    raise AssertionError(f"{path} has no __all__")


def test_the_documentation_names_the_rooms():
    """Every folder of the library is in the tree of docs/rooms.md."""
    tree = (ROOT / "docs" / "rooms.md").read_text()
    rooms = {path.parent.name for path in FILES if path.is_relative_to(ROOT / "specjax")}
    missing = {
        room for room in rooms if not re.search(rf"^ *(specjax/)?{room}/(\s|$)", tree, re.MULTILINE)
    }
    assert not missing - {"specjax"}, f"docs/rooms.md lacks {', '.join(sorted(missing))}"
