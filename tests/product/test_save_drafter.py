"""`save_drafter`: what it writes is read back as the same drafter, and what it refuses."""

import dataclasses
import functools
import json
import pathlib
import warnings

import exports
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exports import SOURCES, make
from heads import TINY, random_heads
from published_target import target
from test_block_drafts import decoder, start

import specjax
from specjax.methods import FORMATS

CAN = {
    "eagle3": ("official", "speculators"),
    "eagle3, own": ("official", "speculators"),
    "eagle3, reduced": ("official", "speculators"),
    "eagle3, a norm each": ("official", "speculators"),
    "eagle3.1": ("official", "speculators"),
    "eagle3, two layers": ("speculators",),
    "eagle3.1, qwen3": ("speculators",),
    "peagle": ("speculators", "specforge"),
    "peagle, own": ("speculators", "specforge"),
    "peagle, reduced": ("speculators", "specforge"),
    "peagle, two taps": ("speculators",),
    "dflash": ("z-lab", "speculators"),
    "dflash, own": ("speculators",),
    "dflash, reduced": ("speculators",),
    "dflash, windows": ("z-lab",),
    "dflash, windows both ways": ("z-lab",),
    "dflash, windows at the anchor": ("speculators",),
    "dflash, scaled": ("z-lab",),
    "dflash, from the anchor": ("speculators",),
    "jetspec": ("z-lab",),
    "dflash2": ("z-lab", "speculators"),
    "dspark": ("deepspec", "specforge", "speculators"),
    "dspark, gated": ("deepspec", "specforge", "speculators"),
    "dspark, rnn": ("deepspec", "specforge", "speculators"),
    "dspark, own": ("deepspec", "speculators"),
    "dspark, reduced": ("speculators",),
    "dspark, from slot 1": ("speculators",),
    "domino": ("specforge",),
    "domino, from slot 1": ("specforge",),
}
"""The layouts that can hold each drafter, the default first."""

PAIRS = [(name, layout) for name, layouts in CAN.items() for layout in layouts]


def layouts_of(name):
    return next(format.layouts for format in FORMATS.values() if format.makes(make(name)))


def test_every_form_is_tried():
    assert CAN.keys() == SOURCES.keys()


def load(folder):
    """Without a warning, but for the one that the documentation announces."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "(?s).*norm_output=true is read as it is served")
        return specjax.load_drafter(folder, target())


@pytest.mark.parametrize(("name", "layout"), PAIRS, ids=[f"{n}-{x}" for n, x in PAIRS])
def test_a_drafter_comes_back(name, layout, tmp_path):
    """The same arrays, source and use of the target's tables."""
    made = make(name)
    specjax.save_drafter(tmp_path / "drafter", made, target(), layout)
    read = load(tmp_path / "drafter")
    assert (read.source, read.shares, read.sizes) == (made.source, made.shares, made.sizes)
    assert jax.tree.structure(read.params) == jax.tree.structure(made.params)
    jax.tree.map(np.testing.assert_array_equal, read.params, made.params)
    assert sorted(file.name for file in (tmp_path / "drafter").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    if layout == "speculators":
        assert read.proposer == made.proposer  # the number of drafts is written


@pytest.mark.parametrize("name", CAN)
def test_what_a_layout_cannot_hold_is_refused(name, tmp_path):
    """The error names the layouts that can, and nothing is written."""
    able = " or ".join(map(repr, CAN[name]))
    for layout in layouts_of(name).keys() - CAN[name]:
        with pytest.raises(ValueError, match=rf"{layout}' cannot hold .* which .*layout={able}$"):
            specjax.save_drafter(tmp_path / "drafter", make(name), target(), layout)
    with pytest.raises(ValueError, match=rf"layout='gguf' is not one of .*layout={able}$"):
        specjax.save_drafter(tmp_path / "drafter", make(name), target(), "gguf")
    assert not (tmp_path / "drafter").exists()


@pytest.mark.parametrize("name", ["eagle3, two layers", "dflash, own", "dspark", "peagle"])
def test_the_default_is_the_first_layout_that_can(name, tmp_path):
    for folder, layout in (("default", None), ("named", CAN[name][0])):
        specjax.save_drafter(tmp_path / folder, make(name), target(), layout)
    for file in ("config.json", "model.safetensors"):
        default, named = (tmp_path / folder / file for folder in ("default", "named"))
        assert default.read_bytes() == named.read_bytes()


TAPS = {
    ("eagle3", "official"): {
        ("eagle_aux_hidden_state_layer_ids",): [1, 2, 4],
        ("eagle_config", "eagle_aux_hidden_state_layer_ids"): [0, 1, 3],
    },
    ("eagle3, two layers", "speculators"): {
        ("eagle_aux_hidden_state_layer_ids",): [0, 1, 3, 4],
    },
    ("peagle", "specforge"): {
        ("eagle_aux_hidden_state_layer_ids",): [1, 2, 4],
        ("eagle_config", "eagle_aux_hidden_state_layer_ids"): [0, 1, 3],
    },
    ("dflash", "z-lab"): {("dflash_config", "target_layer_ids"): [0, 2]},
    ("dflash", "speculators"): {("aux_hidden_state_layer_ids",): [1, 3]},
    ("dspark", "deepspec"): {("target_layer_ids",): [0, 2]},
    ("dspark", "specforge"): {("dflash_config", "target_layer_ids"): [0, 2]},
    ("dspark", "speculators"): {("aux_hidden_state_layer_ids",): [1, 3]},
    ("domino", "specforge"): {("dflash_config", "target_layer_ids"): [0, 2]},
}  # fmt: skip


@pytest.mark.parametrize(("name", "layout"), TAPS)
def test_layers_are_named_as_the_layout_counts_them(name, layout, tmp_path):
    """Taps (1, 3) are the outputs of the layers 0 and 2; no other key names layers."""
    specjax.save_drafter(tmp_path, make(name), target(), layout)
    found = {}

    def search(config, path):
        for key, value in config.items():
            if isinstance(value, dict):
                search(value, (*path, key))
            elif "layer_ids" in key:
                found[*path, key] = value

    search(json.loads((tmp_path / "config.json").read_text()), ())
    assert found == TAPS[name, layout]


@functools.partial(jax.jit, static_argnums=0)
def step(dec, params, state):
    """The drafts of a step, and the state after it."""
    return dec.propose(params, state)[0].tokens, dec.step(params, state)[0]


def drafts(drafter):
    """The proposals of three steps."""
    dec, found = decoder(drafter), []
    params, state = start(dec, drafter)
    for _ in range(3):
        tokens, state = step(dec, params, state)
        found.append(np.asarray(tokens))
    return np.stack(found)


@pytest.mark.parametrize("name", ["eagle3, reduced", "peagle", "dflash", "dspark, own"])
def test_drafts_are_the_same(name, tmp_path):
    """Those that are proposed while texts are decoded, with the drafter before and after."""
    made = make(name)
    specjax.save_drafter(tmp_path, made, target())
    read = dataclasses.replace(load(tmp_path), proposer=made.proposer)
    np.testing.assert_array_equal(drafts(read), drafts(made))


@pytest.mark.parametrize("name", ["eagle3, own", "dspark, reduced"])
def test_weights_are_rounded(name, tmp_path):
    """A file in bfloat16 is half as large, names its dtype, and holds rounded weights."""
    made = make(name)
    for folder, dtype in (("whole", None), ("half", "bfloat16")):
        specjax.save_drafter(tmp_path / folder, made, target(), dtype=dtype)
    sizes = [(tmp_path / f / "model.safetensors").stat().st_size for f in ("whole", "half")]
    assert 1.3 < sizes[0] / sizes[1] < 2
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    read = load(tmp_path / "half")
    rounded = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16).astype(x.dtype) if x.dtype == jnp.float32 else x,
        made.params,
    )
    kept = {key: leaf for key, leaf in read.params.items() if key in rounded}
    jax.tree.map(np.testing.assert_array_equal, kept, rounded)


def test_a_tied_head_is_repeated(tmp_path):
    """A target without a head has it in its embedding, and the file has the head's name."""
    tied = dataclasses.replace(target().model.module.config, tied_embeddings=True)
    model = specjax.LinenModel(specjax.Transformer(tied))
    params = {name: leaf for name, leaf in target().params.items() if name != "head"}
    loaded = specjax.LanguageModel(model, params, name="tied")
    specjax.save_drafter(tmp_path, make("eagle3"), loaded)
    read = specjax.load_drafter(tmp_path, loaded)
    assert read.shares == ("embedding", "head")
    other = specjax.load_drafter(tmp_path, target())  # its head is another matrix
    np.testing.assert_array_equal(other.params["head"]["kernel"], params["embedding"].T)


def test_kernels_that_are_held_turned_are_written(tmp_path):
    """`weight` [out, in] in place of `kernel` [in, out]."""
    made = make("dflash")
    params = {**made.params, "draft": {**made.params["draft"]}}
    params["draft"]["fc"] = {"weight": made.params["draft"]["fc"]["kernel"].T}
    specjax.save_drafter(tmp_path, dataclasses.replace(made, params=params), target())
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path).params, made.params)


def test_a_verifier_on_the_hub_is_named(tmp_path):
    """For block drafts not the name of a folder, which speculators would not find, and not if it
    would replace the drafter's own tables; for EAGLE-3 always, because it asks for one."""
    named = dataclasses.replace(target(), name="org/target-1.5b")
    for name, model, wanted in (
        ("dflash", named, "org/target-1.5b"),
        ("dflash, reduced", named, "org/target-1.5b"),
        ("dflash, own", named, None),
        ("eagle3, own", named, "org/target-1.5b"),
        ("eagle3", target(), "toy target"),
        ("dflash", target(), None),
    ):
        specjax.save_drafter(tmp_path, make(name), model, "speculators")
        config = json.loads((tmp_path / "config.json").read_text())
        verifier = config["speculators_config"]["verifier"]
        assert verifier == {"name_or_path": wanted, "architectures": ["LlamaForCausalLM"]}


def test_medusa_heads_are_saved_by_the_same_door(tmp_path):
    loaded = specjax.load(TINY)
    heads = random_heads(loaded, 0)
    specjax.save_drafter(tmp_path, heads, loaded)
    read = specjax.load_drafter(tmp_path, loaded)
    jax.tree.map(np.testing.assert_array_equal, read.params, heads.params)
    assert read.choices == heads.choices
    with pytest.raises(
        ValueError, match="layout='z-lab' is not allowed; pass one of None, official"
    ):
        specjax.save_drafter(tmp_path, heads, loaded, "z-lab")


def test_a_drafter_replaces_another(tmp_path):
    """Of another format too, with the files of the old one; other files stay."""
    (tmp_path / "notes.txt").write_text("mine")
    loaded = specjax.load(TINY)
    specjax.save_drafter(tmp_path, random_heads(loaded, 0), loaded)
    specjax.save_drafter(tmp_path, make("dspark"), target())
    assert load(tmp_path).source == make("dspark").source
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["config.json", "model.safetensors", "notes.txt"]
    specjax.save_drafter(tmp_path, random_heads(loaded, 0), loaded)
    assert "model.safetensors" not in [file.name for file in tmp_path.iterdir()]
    assert isinstance(specjax.load_drafter(tmp_path, loaded), specjax.MedusaAdapter)


@pytest.mark.parametrize("at", ["write", "move"])
def test_an_interrupted_save_leaves_no_mixture(at, tmp_path, monkeypatch):
    """While it is written the old drafter stays; while files move, none can be loaded."""
    specjax.save_drafter(tmp_path, make("eagle3"), target())
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def stop(*args, **named):
        raise KeyboardInterrupt

    where = {
        "write": "specjax.drafters.folder.json.dumps",
        "move": "specjax.files.folder.os.replace",
    }
    monkeypatch.setattr(where[at], stop)
    with pytest.raises(KeyboardInterrupt):
        specjax.save_drafter(tmp_path, make("dspark"), target())
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert after == before if at == "write" else "config.json" not in after


def test_a_model_is_not_replaced(tmp_path):
    specjax.save(target(), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"something else than a drafter.*another folder"):
        specjax.save_drafter(tmp_path, make("eagle3"), target())
    with pytest.raises(ValueError, match=r"something else than a drafter.*another folder"):
        specjax.save_drafter(tmp_path, random_heads(specjax.load(TINY), 0), specjax.load(TINY))
    assert (tmp_path / "model.safetensors").read_bytes() == before


def without(path):
    def change(made):
        params = jax.tree.map(lambda leaf: leaf, made.params)
        at = params
        for part in path[:-1]:
            at = at[part]
        del at[path[-1]]
        return dataclasses.replace(made, params=params)

    return change


def grown(made):
    params = {**made.params, "mask_hidden": jnp.zeros(7)}
    return dataclasses.replace(made, params=params)


def with_layers(**changes):
    def change(made):
        network = made.source.network
        layers = dataclasses.replace(network.layers, **changes)
        network = dataclasses.replace(network, layers=layers)
        return dataclasses.replace(made, source=dataclasses.replace(made.source, network=network))

    return change


def with_map(tokens):
    def change(made):
        table = np.full(exports.VOCAB, -1, np.int32)
        table[tokens] = np.arange(len(tokens))
        return dataclasses.replace(made, params={**made.params, "to_draft": jnp.asarray(table)})

    return change


REFUSED = {
    "a parameter is missing": (
        "eagle3", without(("network", "fc", "kernel")), r"network/fc/kernel is missing",
    ),
    "a parameter of another shape": (
        "peagle", grown, r"mask_hidden has shape \[7\]; its source needs \[48\]",
    ),
    "a setting of the layers": (
        "eagle3", with_layers(norm_offset=1.0), r"'official': it has layers of norm_offset=1.0",
    ),
    "layers without a rope": (
        "eagle3", with_layers(rope=None), "'speculators': it has layers without a rope",
    ),
    "windows": ("peagle", with_layers(windows=(4, None)), "has layers with windows"),
    "a map of fewer tokens": (
        "eagle3, reduced", with_map(np.arange(5)), "to_draft names 5 tokens, and the head has 12",
    ),
    "a map without a head": (
        "eagle3", with_map(np.arange(12)), "has a reduced vocabulary and a head of 29 rows",
    ),
    "a head without a map": (
        "dflash, reduced", without(("to_draft",)), "has a whole vocabulary and a head of 12 rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_written_is_refused(case, tmp_path):
    """By name, and nothing is written."""
    name, change, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        specjax.save_drafter(tmp_path / "drafter", change(make(name)), target())
    assert not (tmp_path / "drafter").exists()


def test_bad_arguments_are_refused(tmp_path):
    made = make("eagle3")
    with pytest.raises(ValueError, match=r"drafter=.*; pass a drafter with weights of its own"):
        specjax.save_drafter(tmp_path, specjax.NGram(), target())
    with pytest.raises(ValueError, match=r"target=.*; pass what specjax.load"):
        specjax.save_drafter(tmp_path, made, "org/target")
    with pytest.raises(ValueError, match=r"is for a target of hidden size 16, 29 tokens"):
        specjax.save_drafter(tmp_path, made, specjax.load(TINY))
    with pytest.raises(ValueError, match="dtype='int4' is not supported"):
        specjax.save_drafter(tmp_path, made, target(), dtype="int4")
    with pytest.raises(ValueError, match=r"layout=\['official'\] is not one of"):
        specjax.save_drafter(tmp_path, made, target(), ["official"])
    with pytest.raises(ValueError, match=r"uses the head of its target.*quantised"):
        specjax.save_drafter(tmp_path, made, specjax.quantise(target()))
    assert not list(pathlib.Path(tmp_path).iterdir())
