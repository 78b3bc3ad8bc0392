"""The structure holds: imports go down only, and what the README prints of it is true."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# A file imports from floors below its own, and from its own package where that is named twice.
FLOORS = [
    ["specjax.types", "specjax.arguments"],
    [f"specjax.{name}" for name in ("tree", "cache", "recurrent", "sampling", "metrics", "chisquare", "vocabulary")]
    + ["specjax.logprobs", "specjax.plot", "specjax.caches.prefill"],
    ["specjax.processors", "specjax.caches.ring"],
    ["specjax.models.rope", "specjax.models.products", "specjax.models.base"],
    ["specjax.models.attention"],
    ["specjax.models.config"],
    [f"specjax.models.{name}" for name in ("layers", "family", "fields", "medusa")],
    ["specjax.models.function", "specjax.models.check"],
    ["specjax.models.adapters"],
    ["specjax.models.transformer"],
    ["specjax.models.families.llama"],
    [f"specjax.models.{name}" for name in ("mistral", "qwen", "gemma", "smollm3", "olmo2", "phi3", "gpt2", "opt")]
    + ["specjax.models.families.gpt_neox"],
    ["specjax.models"],
    ["specjax.parallel.sharding"],
    ["specjax.parallel.memory"],
    ["specjax.rules.confidence"],
    [f"specjax.rules.{name}" for name in ("match", "rejection", "block", "typical", "threshold")],
    ["specjax.rules"],
    ["specjax.proposers.chain", "specjax.proposers.choices"],
    [f"specjax.proposers.{name}" for name in ("none", "ngram", "draft_model", "universal", "medusa")],
    ["specjax.proposers.draft_tree", "specjax.proposers.early_exit", "specjax.proposers.first_of"],
    ["specjax.proposers.dynamic_tree"],
    ["specjax.proposers"],
    ["specjax.files.tensors", "specjax.text.chat"],
    ["specjax.files.hub", "specjax.files.orbax"],
    ["specjax.decoding", "specjax.files.checkpoint"],
    ["specjax.drafters.bank", "specjax.files.quantised"],
    ["specjax.files.medusa", "specjax.drafters.pairing", "specjax.text.stops"],
    ["specjax.call"],
    ["specjax.generate", "specjax.audit.auditing"],
    ["specjax"],
    ["specjax.flags.progress", "specjax.parallel.processes", "specjax.flags.speculation"],
    ["specjax.flags.inputs"],
    ["specjax.commands.generate", "specjax.commands.bench", "specjax.commands.audit"],
    ["specjax.commands"],
    ["specjax.__main__"],
    ["train.peers"],
    ["train.options", "train.precision", "train.divergences", "train.measure", "train.formats"],
    ["train.masks", "train.conversations", "train.lora", "train.recipes", "train.mesh"],
    ["train.heads"],
    ["train.corpus", "train.losses", "train.optimizer", "train.record", "train.speculation", "train.online"],
    ["train.accepted", "train.curves", "train.dataset", "train.student", "train.prompts"],
    ["train.material", "train.sources"],
    ["train.loop"],
    ["train.pretrain", "train.distill", "train.generate", "train.evaluate", "train.medusa", "train.export"],
    ["train.ablation"],
    [f"bench.{name}" for name in ("command", "machine", "weights", "prompts", "imposed")],
    ["bench.drawing", "bench.sampler", "bench.vocabularies", "bench.growth", "bench.laws"],
    ["bench.contestants", "bench.spec_bench"],
    ["bench.timing", "bench.torch_loop"],
    ["bench.__main__"],
    ["bench.goals"],
    ["train.bench"],
]
FLOOR = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}
FILES = sorted(p for top in ("specjax", "train", "bench") for p in (ROOT / top).rglob("*.py"))


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
    return {name for name in found if name.split(".")[0] in ("specjax", "train", "bench", "tests")}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_go_down(path):
    module = module_of(path)
    if path.read_text() == "":
        return
    assert module in FLOOR, f"{module} has no floor: add it to FLOORS"
    for name in imports_of(path):
        assert FLOOR[name] < FLOOR[module], f"{module} imports {name}, which is not below it"


def test_a_helper_of_the_tests_has_one_name():
    """`toys` and `tests.toys` would be two modules, each with models and programs of its own."""
    files = sorted((ROOT / "tests").glob("*.py"))
    assert len(files) > 50
    for path in files:
        assert not [name for name in imports_of(path) if name.split(".")[0] == "tests"], path


def test_the_library_knows_no_training_and_no_nnx():
    """`flax.nnx` has broken with four JAX releases; importing it at package import would break specjax too."""
    for path in FILES:
        text = path.read_text()
        if path.is_relative_to(ROOT / "specjax"):
            assert not re.search(r"^\s*(from|import) (train|optax|torch|transformers)\b", text, re.MULTILINE), path
            # What an extra brings is imported where it is needed.
            assert not re.search(r"^(from|import) (orbax|huggingface_hub|jinja2)\b", text, re.MULTILINE), path
        at_import = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not any(re.search(r"flax\b.*\bnnx", ast.unparse(node)) for node in at_import), path


def test_every_file_says_what_it_is_for():
    for path in FILES:
        text = path.read_text()
        assert not text or ast.get_docstring(ast.parse(text)), f"{path} opens without a docstring"
        assert len(text.splitlines()) <= 400, f"{path} is too long: is it still one thought?"


def test_the_readme_prints_the_tree_of_files():
    readme = (ROOT / "README.md").read_text()
    for path in FILES:
        if path.read_text() and path.name not in ("__init__.py",):
            assert re.search(rf"^ .*\b{re.escape(path.name)}\s", readme, re.MULTILINE), f"README's tree lacks {path}"
