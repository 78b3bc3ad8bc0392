"""The structure holds: imports go down only, and what the README prints of it is true."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# A file imports from floors below its own, and from its own package where that is named twice.
FLOORS = [
    ["specjax.types"],
    ["specjax.tree", "specjax.cache", "specjax.sampling", "specjax.metrics"],
    ["specjax.models.rope", "specjax.models.attention", "specjax.models.base"],
    ["specjax.models.transformer"],
    ["specjax.models.family"],
    ["specjax.models.llama"],
    ["specjax.models"],
    ["specjax.rules.match", "specjax.rules.rejection"],
    ["specjax.rules"],
    ["specjax.proposers.chain"],
    ["specjax.proposers.none", "specjax.proposers.ngram", "specjax.proposers.draft_model"],
    ["specjax.proposers"],
    ["specjax.decoding", "specjax.checkpoint"],
    ["specjax.generate"],
    ["specjax"],
    ["specjax.commands.progress"],
    ["specjax.commands.inputs"],
    ["specjax.commands.generate", "specjax.commands.bench"],
    ["specjax.commands"],
    ["specjax.__main__"],
    ["train.options", "train.precision", "train.corpus"],
    ["train.losses", "train.loop", "train.student"],
    ["train.pretrain", "train.distill"],
]
FLOOR = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}
FILES = sorted(p for top in ("specjax", "train") for p in (ROOT / top).rglob("*.py"))


def module_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: pathlib.Path) -> set[str]:
    """Modules of this project that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in FLOOR else node.module)
    return {name for name in found if name.split(".")[0] in ("specjax", "train", "tests")}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_go_down(path):
    module = module_of(path)
    if path.read_text() == "":
        return
    assert module in FLOOR, f"{module} has no floor: add it to FLOORS"
    for name in imports_of(path):
        assert FLOOR[name] < FLOOR[module], f"{module} imports {name}, which is not below it"


def test_the_library_knows_no_training_and_no_nnx():
    """`flax.nnx` has broken with four JAX releases; importing it at package import would break specjax too."""
    for path in FILES:
        text = path.read_text()
        if path.is_relative_to(ROOT / "specjax"):
            assert not re.search(r"^\s*(from|import) (train|optax|orbax|torch|transformers)\b", text, re.MULTILINE), (
                path
            )
        assert "nnx" not in text, path


def test_every_file_says_what_it_is_for():
    for path in FILES:
        text = path.read_text()
        assert not text or ast.get_docstring(ast.parse(text)), f"{path} opens without a docstring"
        assert len(text.splitlines()) <= 400, f"{path} is too long: is it still one thought?"


def test_the_readme_prints_the_tree_of_files():
    readme = (ROOT / "README.md").read_text()
    for path in FILES:
        if path.read_text() and path.name not in ("__init__.py",):
            assert re.search(rf"^\s*{re.escape(path.name)}\s", readme, re.MULTILINE), f"README's tree lacks {path}"
