"""Students of any family: their configurations, their folders, and the parts of a target."""

from __future__ import annotations

import dataclasses
import json
import shutil

import folders
import jax
import numpy as np
import pytest
import torch
import trained
import transformers
import transformers_folders
from test_families import CASES, CONFIGS, make
from test_models import ours, theirs

import specjax
from specjax.files import read_config
from specjax.models import FAMILIES
from specjax.training.families import alike, cut, stretched
from specjax.training.jobs import distill
from specjax.training.jobs.distill import DistillOptions
from specjax.training.jobs.pretrain import PretrainOptions
from specjax.training.student import initial_params, make_model, no_wider, save_student

SMALL = {"hidden_size": 32, "num_layers": 3, "num_heads": 2}


def options(folder, **changes):
    return DistillOptions(target=str(folder), data=(), sequence_length=64, **changes)


def config_of(family, case):
    made = transformers_folders.configured(family, **CONFIGS[family][case]).to_dict()
    return FAMILIES[family].read_config({**made, "model_type": family})


@pytest.mark.parametrize(("family", "case"), CASES)
def test_a_configuration_of_every_family(family, case):
    """Other sizes and a choice of layers have a config.json of the family that says just that."""
    config = config_of(family, case)
    write = FAMILIES[family].write_config
    last = config.num_layers - 1
    if config.owner_of(last) != last:
        with pytest.raises(ValueError, match="keep that layer too"):
            cut(config, [last], "--from-layers x")
        return
    made = alike(options("", **SMALL).sizes, config, 96, 700, "--like x")
    assert FAMILIES[family].read_config(write(made)) == made
    assert (made.hidden_size, made.num_layers, made.num_heads) == (32, 3, 2)
    assert (made.norm_order, made.qk_norm, made.gated) == (
        config.norm_order, config.qk_norm, config.gated
    )  # fmt: skip
    one = cut(config, [last], "--from-layers x")
    assert FAMILIES[family].read_config(write(one)) == one
    assert one.window_of(0) == config.window_of(last)
    assert one.rope_of(0) == config.rope_of(last)


def test_sizes_that_are_not_asked_for():
    """They are in proportion to the hidden size, and heads keep their size if they can."""
    config = config_of("qwen3", "plain")
    made = alike(options("", hidden_size=128).sizes, config, 96, 64, "")
    assert (made.num_heads, made.num_kv_heads, made.head_dim) == (8, 4, 24)
    assert (made.mlp_size, made.num_layers, made.max_positions) == (144, 2, 640)
    made = alike(options("", hidden_size=48).sizes, config_of("gpt2", "plain"), 96, 64, "")
    assert (made.num_heads, made.num_kv_heads, made.head_dim) == (3, 3, 16)
    with pytest.raises(ValueError, match="cannot have 3 heads of size 13: pass a --num-heads"):
        asked = options("", like="target", hidden_size=40, num_heads=3)
        alike(asked.sizes, config_of("gpt2", "plain"), 96, 64, "")


def test_contexts():
    """Plain rotary positions can be extended; learned and scaled ones cannot."""
    for family, case, wanted in (
        ("llama", None, 4096), ("qwen2", "yarn", 640), ("gpt2", "plain", 640)
    ):  # fmt: skip
        config = config_of(family, case) if case else config_of("qwen2", "plain")
        assert stretched(config, 4096).max_positions == wanted
        assert stretched(config, 8).max_positions == 640
    learned = alike(options("").sizes, config_of("gpt2", "plain"), 96, 4096, "")
    assert learned.max_positions == 4096, "a new table of positions has any length"


def write(folder, model, params, asked):
    """Save a student whose vocabulary is too small for the tests' tokenizer."""
    save_student(folder, model, params, folders.tokenizer(), (0,), start=asked.start)
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize("family", ["qwen3", "gemma", "gpt2", "gemma3_text", "llama"])
def test_a_student_that_is_like_its_target(tmp_path, family):
    """Its folder is one of the family: `load` and transformers read the same logits from it."""
    case = next(iter(CONFIGS[family])) if family != "llama" else None
    folder = make(family, case)[1] if case else folders.target()
    asked = options(folder, like="target", **SMALL)
    size = read_config(folder)[2].vocab_size
    model = make_model(asked, size, 640)
    assert model.module.config.family == family
    write(tmp_path, model, initial_params(model, asked), asked)
    loaded = specjax.load(tmp_path)
    assert loaded.model.module.config == model.module.config
    tokens = folders.random_tokens(200, vocab_size=96)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    np.testing.assert_allclose(ours(loaded, tokens), theirs(reference, tokens), atol=5e-4)


@pytest.mark.parametrize(
    ("hidden", "mlp", "asked", "wanted"),
    [
        (64, 172, {}, (64, 172)),  # the target is narrower than the defaults
        (66, 172, {}, (64, 172)),  # two heads of an even number of dimensions
        (256, 172, {}, (None, 172)),
        (128, 352, {}, (None, None)),
        (2048, 8192, {}, (None, None)),
        (64, 172, {"hidden_size": 256}, (256, 172)),  # what was asked for stays
        (64, 172, {"num_heads": 8, "num_kv_heads": 8}, (64, 172)),
        (64, 172, {"like": "folder"}, (None, None)),
    ],
)
def test_a_new_draft_is_no_wider_than_its_target(hidden, mlp, asked, wanted):
    target = dataclasses.replace(
        config_of("qwen3", "plain"), hidden_size=hidden, mlp_size=mlp, head_dim=8
    )
    made = no_wider(options("", **asked), target)
    assert (made.hidden_size, made.mlp_size) == wanted
    assert no_wider(made, target) == made
    if made.start is None:
        model = make_model(made, 96)
        assert model.module.config.hidden_size == wanted[0] or wanted[0] is None


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "smollm3"])
def test_layers_of_a_target(tmp_path, family):
    """The student has the target's layers, embedding, norm and output matrix, bit for bit."""
    folder = make(family, "plain")[1]
    config = read_config(folder)[2]
    layers = (3, 0) if config.num_layers == 4 else (1,)
    asked = options(folder, from_layers=layers)
    model = make_model(asked, 96, 640)
    made, whole = initial_params(model, asked), specjax.load(folder).params
    for new, old in enumerate(layers):
        jax.tree.map(np.testing.assert_array_equal, made[f"layer_{new}"], whole[f"layer_{old}"])
    rest = [name for name in made if not name.startswith("layer_")]
    assert {"embedding", "norm"} <= set(rest) and len(made) == len(rest) + len(layers)
    for name in rest:
        jax.tree.map(np.testing.assert_array_equal, made[name], whole[name])
    write(tmp_path, model, made, asked)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = folders.random_tokens(100, vocab_size=96)
    np.testing.assert_allclose(
        ours(specjax.load(tmp_path), tokens), theirs(reference.eval(), tokens), atol=1e-4
    )


def test_layers_that_are_loaded():
    """`load(layers=)` reads a part of a model; other lists are refused."""
    folder = folders.target()
    one = specjax.load(folder, layers=[1])
    assert one.model.module.config.num_layers == 1
    for wrong in ([], [2], [0, 0], [-1], [0.5], "01", 3):
        with pytest.raises(ValueError, match=r"layers.* it must be a list of layers, each once"):
            specjax.load(folder, layers=wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"initial": "a", "from_layers": (0,)}, "--initial a and --from-layers 0 exclude each"),
        ({"initial": "a", "early_exit": 1}, "--initial a and --early-exit 1 exclude each other"),
        ({"from_layers": (0, 0)}, "--from-layers 0 0: name layers from 0, each once"),
        ({"from_layers": (-1,)}, "--from-layers -1: name layers from 0"),
        ({"early_exit": 0}, "--early-exit is 0; it must be at least 1"),
        ({"num_heads": 3}, "--num-kv-heads|--hidden-size is 128; twice --num-heads 3 must"),
    ],
)
def test_sources_that_exclude_each_other(changes, message):
    with pytest.raises(ValueError, match=message):
        options("", **changes)


def test_layers_that_are_not_there():
    """The error names the first of them, and which there are."""
    for asked in ({"from_layers": (0, 5)}, {"early_exit": 6}):
        made = options(folders.target(), **asked)
        with pytest.raises(ValueError, match=r"has layers 0 to 1, and no layer [25]"):
            make_model(made, 320, 512)
    with pytest.raises(ValueError, match="--from-layers 0 needs --like with the folder"):
        PretrainOptions(data=(), from_layers=(0,))
    with pytest.raises(ValueError, match=r"does not fit --hidden-size 9: pass --hidden-size 48"):
        make_model(options(folders.target(), from_layers=(0,), hidden_size=9), 320, 512)


def run(out, target, *more):
    distill.main([
        "--target", str(target), "--data", str(trained.text()), "--out", str(out), "--steps", "6",
        "--sampled-fraction", "0", "--sampled-prompt", "4", "--sequence-length", "32",
        "--batch-size", "4", "--eval-batches", "2", "--eval-every", "6", "--log-every", "1",
        "--warmup-steps", "0", "--learning-rate", "0.02", *more,
    ])  # fmt: skip
    return out / "model"


def test_an_early_exit(tmp_path):
    """The written model is the target's first layer with its output matrix; the norm alone has
    learned, and its loss has fallen."""
    exact = specjax.load(folders.target(), "bfloat16")
    specjax.save(exact, tmp_path / "target")
    more = ["--early-exit", "1", "--steps", "60", "--learning-rate", "0.03"]
    made = specjax.load(run(tmp_path / "run", tmp_path / "target", *more))
    whole = specjax.load(tmp_path / "target")
    assert made.model.module.config == whole.model.module.config.truncated(1)
    for name in ("embedding", "layer_0", "head"):
        jax.tree.map(np.testing.assert_array_equal, made.params[name], whole.params[name])
    assert (made.params["norm"]["weight"] != whole.params["norm"]["weight"]).any()
    losses = [line["loss"] for line in trained.metrics(tmp_path / "run") if "loss" in line]
    assert losses[-1] < losses[0]
    shapes = json.loads((tmp_path / "run" / "run.json").read_text())["shapes"]
    own = [name for name in shapes if name.startswith("['params']")]
    assert own == ["['params']['norm']['weight']"]


def test_an_initial_folder_is_kept(tmp_path):
    """Configuration, context, tokenizer, chat template and sampling defaults are those of the
    folder; the training sequence's length appears nowhere."""
    first = shutil.copytree(folders.draft(), tmp_path / "first")
    (first / "chat_template.jinja").write_text("{{ messages }}")
    folders.edit(first, "config.json", note="kept", vocab_size=320)
    folders.edit(first, "generation_config.json", do_sample=True, temperature=0.7)
    target = folders.target()
    config = dataclasses.replace(read_config(target)[2], max_positions=700)
    model = specjax.LinenModel(specjax.Transformer(config))
    params = model.init(jax.random.key(0))
    specjax.save(specjax.LanguageModel(model, params, folders.tokenizer(), (0,)), tmp_path / "more")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "more" / name, first / name)
    folders.edit(first, "config.json", note="kept")
    made = run(tmp_path / "run", target, "--initial", str(first))
    said = json.loads((made / "config.json").read_text())
    assert (said["note"], said["max_position_embeddings"]) == ("kept", 700)
    again = specjax.load(made)
    assert again.defaults["temperature"] == 0.7 and again.model.module.config == config
    for name in ("chat_template.jinja", "tokenizer.json"):
        assert (made / name).read_bytes() == (first / name).read_bytes()


def test_a_new_draft_reads_as_much_as_its_target(tmp_path):
    """A context that is cut to the training sequence would limit the target."""
    sizes = ("--hidden-size", "16", "--mlp-size", "16", "--num-heads", "2", "--num-kv-heads", "1")
    made = specjax.load(run(tmp_path / "run", folders.target(), *sizes, "--steps", "1"))
    assert made.model.max_positions == 512
