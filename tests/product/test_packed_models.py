"""Models with packed weights: logits, texts and files of folders in every format."""

import json

import eagle3_folders
import folders
import jax
import jax.numpy as jnp
import lora_folders
import ml_dtypes
import numpy as np
import packed_folders
import pytest

import specjax
from specjax import LanguageModel
from specjax.cli import main
from specjax.models import FAMILIES, Int8, LinenModel, Packed, Transformer, is_packed
from specjax.models.packed import holds_packed

IDS = np.random.default_rng(3).integers(1, 300, 24).tolist()


def logits(model, ids=IDS):
    tokens = jnp.asarray([ids])
    positions = jnp.arange(len(ids))[None]
    return np.asarray(model.model.apply(model.params, tokens, positions).logits, np.float32)


def close(model, other, most=1e-5):
    ours, theirs = logits(model), logits(other)
    assert np.ptp(theirs) > 1
    assert np.abs(ours - theirs).max() < most * np.abs(theirs).max()


def leaves(model):
    flat = jax.tree_util.tree_leaves_with_path(model.params, is_leaf=is_packed)
    return {"/".join(key.key for key in path): leaf for path, leaf in flat}


def texts(model, **how):
    return specjax.generate(model, [IDS[:9], IDS[4:17]], max_new_tokens=24, **how).tokens


@pytest.mark.parametrize(
    ("format", "dtype"),
    [(format, "float32") for format in packed_folders.FORMATS]
    + [(format, "bfloat16") for format in ("act-order", "fp8", "nvfp4")],
)
def test_logits_are_those_of_the_dequantised_model(format, dtype):
    """Every linear map of a layer stays packed, and the output matrix is plain."""
    folder = packed_folders.write(format, f"packed-{format}")
    model = specjax.load(folder, dtype)
    plain = specjax.load(folder, dtype, dequantise=True)
    close(model, plain, 1e-5 if dtype == "float32" else 3e-2)
    held = {name for name, leaf in leaves(model).items() if isinstance(leaf, Packed)}
    assert len(held) == 2 * 7
    assert not any("head" in name or "embedding" in name for name in held)
    assert not holds_packed(plain.params)
    assert model.num_params == plain.num_params


@pytest.mark.parametrize("format", ["act-order", "awq", "fp8", "nvfp4"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_changes_no_text(format, temperature):
    """With one key, plain decoding, prompt lookup and a draft model give the same tokens."""
    model = specjax.load(packed_folders.write(format, f"packed-{format}"))
    how = {"temperature": temperature, "seed": 5}
    expected = texts(model, proposer="none", **how)
    assert texts(model, proposer="ngram", **how) == expected
    draft = specjax.load(folders.write(folders.random_llama(4), "packed-draft", tokens=False))
    for own in (draft, model):
        assert texts(model, proposer="draft", draft=own, num_drafts=3, **how) == expected


@pytest.mark.parametrize("format", ["gptq", "fp8"])
def test_a_published_head_drafts_for_a_packed_target(tmp_path, format):
    """An EAGLE-3 head that is not packed reads the target's layers, and changes no text."""
    made = packed_folders.packed(eagle3_folders.target_model(), format)
    made.save_pretrained(tmp_path)
    target = specjax.load(tmp_path)
    assert holds_packed(target.params)
    drafter = specjax.load_drafter(eagle3_folders.folder("speculators"), target)
    for temperature in (0.0, 1.0):
        how = {"temperature": temperature, "seed": 3}
        expected = texts(target, proposer="none", **how)
        assert texts(target, drafter=drafter, **how) == expected


def test_layers_that_are_left_out(tmp_path):
    """A folder decides tensor by tensor, and so do the parameters."""
    folder = packed_folders.write("fp8", "packed-mixed", plain=r"layers\.1\.|o_proj")
    model = specjax.load(folder)
    held = {name for name, leaf in leaves(model).items() if isinstance(leaf, Packed)}
    assert len(held) == 6
    assert all("layer_0" in name for name in held)
    assert "layer_0/attention/o/kernel" not in held
    close(model, specjax.load(folder, dequantise=True))


def test_some_layers_and_one_more_quantisation():
    """`layers` reads some of them, and `quantise` rounds what is packed to int8."""
    folder = packed_folders.write("int4", "packed-int4")
    last = specjax.load(folder, layers=[1])
    close(last, specjax.load(folder, layers=[1], dequantise=True))
    rounded = specjax.quantise(specjax.load(folder))
    assert not holds_packed(rounded.params)
    close(rounded, specjax.quantise(specjax.load(folder, dequantise=True)), 1e-4)


def test_a_lora_is_merged_into_dequantised_matrices(tmp_path):
    """The matrices that it changes are plain, and the others stay packed."""
    folder = packed_folders.write("gptq", "packed-gptq")
    plain, rng, arrays = specjax.load(folder, dequantise=True), np.random.default_rng(0), {}
    module = "model.layers.1.mlp.down_proj"
    arrays["A"], arrays["B"] = lora_folders.pair(rng, 64, 96)
    names = {end: f"base_model.model.{module}.lora_{end}.weight" for end in "AB"}
    made = {names[end]: array for end, array in arrays.items()}
    adapter = lora_folders.write(tmp_path / "lora", made, target_modules=["down_proj"])
    model = specjax.load(folder, lora=adapter)
    held = {name for name, leaf in leaves(model).items() if isinstance(leaf, Packed)}
    assert len(held) == 2 * 7 - 1
    assert "layer_1/mlp/down/kernel" not in held
    merged = plain.params["layer_1"]["mlp"]["down"]["kernel"].T
    merged = merged + 5 / lora_folders.RANK * arrays["B"] @ arrays["A"]
    there = leaves(model)["layer_1/mlp/down/kernel"].T
    np.testing.assert_allclose(there, merged, atol=1e-5)
    close(model, specjax.load(folder, lora=adapter, dequantise=True))


def same_numbers(model, other):
    ours, theirs = leaves(model), leaves(other)
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        assert isinstance(theirs[name], Packed) == isinstance(leaf, Packed)
        pair = [x.dense(jnp.float32) if isinstance(x, Packed) else x for x in (leaf, theirs[name])]
        np.testing.assert_array_equal(*map(np.asarray, pair), err_msg=name)


@pytest.mark.parametrize("format", ["gptq", "act-order", "awq", "int8", "int4"])
def test_whole_numbers_are_saved_as_compressed_tensors(tmp_path, format):
    """The same numbers come back, and layers that are left out are named."""
    folder = packed_folders.write(format, f"packed-{format}-mixed", plain=r"layers\.1\.mlp")
    model = specjax.load(folder)
    specjax.save(model, tmp_path)
    same_numbers(model, specjax.load(tmp_path))
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "pack-quantized"
    assert {"lm_head", "model.layers.1.mlp.up_proj"} <= set(settings["ignore"])
    (group,) = settings["config_groups"].values()
    weights = group["weights"]
    assert weights["symmetric"] == (format != "awq")
    assert weights["num_bits"] == (8 if format == "int8" else 4)
    assert (weights["actorder"] is not None) == (format == "act-order")
    last = specjax.load(folder, layers=[0])
    specjax.save(last, tmp_path / "first")
    same_numbers(last, specjax.load(tmp_path / "first"))


def same_files(folder, other):
    """Every tensor of a folder is in the other one, bit for bit, and nothing else."""
    ours, theirs = packed_folders.read_tensors(folder), packed_folders.read_tensors(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert (tensor.shape or (1,)) == (theirs[name].shape or (1,)), name
        assert tensor.tobytes() == theirs[name].tobytes(), name


@pytest.mark.parametrize("format", ["fp8", "fp8 by output", "nvfp4", "nvfp4 divided", "mxfp4"])
def test_fp8_and_fp4_are_saved_as_they_were_read(tmp_path, format):
    """With the configuration that they were read with."""
    folder = packed_folders.write(format, f"packed-{format.replace(' ', '-')}")
    model = specjax.load(folder)
    specjax.save(model, tmp_path / "again")
    same_files(folder, tmp_path / "again")
    settings = [
        json.loads((place / "config.json").read_text())["quantization_config"]
        for place in (folder, tmp_path / "again")
    ]
    assert settings[0] == settings[1]
    same_numbers(model, specjax.load(tmp_path / "again"))


def test_saving_plain_numbers(tmp_path):
    """The dequantised model is saved as a plain one."""
    folder = packed_folders.write("nvfp4", "packed-nvfp4")
    plain = specjax.load(folder, dequantise=True)
    specjax.save(plain, tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    np.testing.assert_array_equal(logits(specjax.load(tmp_path / "plain")), logits(plain))


def test_int4_of_our_own(tmp_path):
    """Every number is within half a step, one end of a group within one; and files hold it."""
    folder = folders.write(
        folders.random_llama(2, hidden_size=128, intermediate_size=96), "rounded", tokens=False
    )
    plain, model = specjax.load(folder), specjax.load(folder, "int4")
    ours, wide = leaves(model), leaves(plain)
    held = {name for name, leaf in ours.items() if isinstance(leaf, Packed)}
    assert len(held) == 2 * 7
    groups = {ours[f"layer_0/mlp/{part}/kernel"].group for part in ("up", "down")}
    assert groups == {128, 32}
    for name in held:
        leaf = ours[name]
        steps = jnp.repeat(leaf.scales.astype(jnp.float32), leaf.group, axis=-1).T
        error = np.abs(leaf.dense(jnp.float32) - wide[name]) / steps
        assert float(error.max()) < 0.56
        assert float((error > 0.51).mean()) < 0.02
    assert 0.01 < np.abs(logits(model) - logits(plain)).max() / np.ptp(logits(plain)) < 0.5
    how = {"temperature": 1.0, "seed": 2}
    expected = texts(plain, proposer="none", **how)
    assert texts(plain, draft=model, proposer="draft", num_drafts=3, **how) == expected
    specjax.save(model, tmp_path)
    same_numbers(model, specjax.load(tmp_path))
    with pytest.raises(ValueError, match="leave one of them out"):
        specjax.load(folder, "int4", dequantise=True)


@pytest.mark.parametrize(
    ("format", "dtype"),
    [("act-order", None), ("awq", "bfloat16"), ("int8", None), ("mxfp4", None), ("fp8", None)],
)
def test_rounded_activations_make_another_model_with_the_same_laws(format, dtype):
    """Its logits are near, and it writes the same text with drafts and without."""
    folder = packed_folders.write(format, f"packed-{format}")
    model, rounded = specjax.load(folder, dtype), specjax.load(folder, dtype, activations="int8")
    assert rounded.name == f"{model.name} with int8 activations"
    assert isinstance(rounded.params["head"]["kernel"], Int8)
    error = np.abs(logits(rounded) - logits(model)).max() / np.ptp(logits(model))
    assert 1e-4 < error < 0.05
    how = {"temperature": 1.0, "seed": 2}
    expected = texts(rounded, proposer="none", **how)
    assert texts(rounded, draft=model, proposer="draft", num_drafts=3, **how) == expected
    assert texts(rounded, proposer="ngram", num_drafts=2, **how) == expected


def random_model(kind, **config):
    """A model of a family with random weights, all of which count."""
    base = {
        "model_type": kind, "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "initializer_range": 0.15, **config,
    }  # fmt: skip
    network = LinenModel(Transformer(FAMILIES[kind].read_config(base)))
    params = network.init(jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 1000))

    def moved(leaf):
        small = leaf.ndim == 1
        return leaf + 0.2 * jax.random.normal(next(keys), leaf.shape) if small else leaf

    return LanguageModel(network, jax.tree.map(moved, params), name=kind)


def repacked(model, folder, config, change):
    """Save a model, and let `change` replace tensors by packed ones."""
    specjax.save(model, folder)
    packed_folders.change_tensors(folder, change)
    folders.edit(folder, quantization_config=config)
    return folder


@pytest.mark.parametrize("format", ["fp8", "int4", "gptq", "act-order"])
def test_experts(tmp_path, format):
    """A stack of experts is packed too, and each token reads its own experts."""
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    model = random_model("qwen3_moe", **sizes)
    make, config = packed_folders.FORMATS[format]
    maker = packed_folders.Maker()

    def change(tensors):
        for name in [name for name in tensors if packed_folders.LINEAR.search(name)]:
            shape, start = tensors.pop(name).shape, name.removesuffix("weight")
            made = make(maker, *shape)
            tensors |= {start + end: part for end, part in made.items()}

    folder = repacked(model, tmp_path / "experts", config, change)
    loaded, plain = specjax.load(folder), specjax.load(folder, dequantise=True)
    assert isinstance(leaves(loaded)["layer_0/mlp/up"], Packed)
    assert (leaves(loaded)["layer_0/mlp/up"].order is not None) == (format == "act-order")
    close(loaded, plain)
    many = np.random.default_rng(0).integers(1, 300, 200).tolist()
    np.testing.assert_allclose(logits(loaded, many), logits(plain, many), atol=2e-3)
    assert texts(loaded, proposer="ngram") == texts(plain, proposer="none")
    if format == "fp8":
        specjax.save(loaded, tmp_path / "again")
        same_files(folder, tmp_path / "again")


def test_gpt_oss(tmp_path):
    """MXFP4 tensors of all experts: the outputs of gate and up lie in turn."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    model = random_model("gpt_oss", **sizes)
    rng = np.random.default_rng(0)

    def change(tensors):
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, into, out = tensors.pop(name).shape
            blocks = rng.integers(0, 256, (experts, out, into // 32, 16)).astype(np.uint8)
            tensors[f"{name}_blocks"] = blocks
            scales = rng.integers(122, 125, (experts, out, into // 32)).astype(np.uint8)
            tensors[f"{name}_scales"] = scales

    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    folder = repacked(model, tmp_path / "gpt-oss", config, change)
    loaded, plain = specjax.load(folder), specjax.load(folder, dequantise=True)
    assert isinstance(leaves(loaded)["layer_1/mlp/gate"], Packed)
    close(loaded, plain)
    specjax.save(loaded, tmp_path / "again")
    same_files(folder, tmp_path / "again")
    assert texts(loaded, proposer="ngram") == texts(plain, proposer="none")


def test_fused_and_cut_matrices(tmp_path):
    """Phi-3's tensors hold several matrices; those that latent attention cuts are dequantised."""
    model = random_model("phi3", pad_token_id=0, bos_token_id=0, eos_token_id=0)
    make, config = packed_folders.FORMATS["int4"]
    maker = packed_folders.Maker()

    def change(tensors):
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            shape, start = tensors.pop(name).shape, name.removesuffix("weight")
            tensors |= {start + end: part for end, part in make(maker, *shape).items()}

    folder = repacked(model, tmp_path / "phi3", config, change)
    loaded = specjax.load(folder)
    assert isinstance(leaves(loaded)["layer_0/attention/k/kernel"], Packed)
    close(loaded, specjax.load(folder, dequantise=True))
    sizes = {
        "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
        "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "num_key_value_heads": 4, "n_shared_experts": 1,
    }  # fmt: skip
    model = random_model("deepseek_v3", **sizes)
    make, config = packed_folders.FORMATS["fp8"]

    def in_fp8(tensors):
        for name in [n for n in tensors if "_proj" in n and n.endswith(".weight")]:
            shape, start = tensors.pop(name).shape, name.removesuffix("weight")
            tensors |= {start + end: part for end, part in make(maker, *shape).items()}

    folder = repacked(model, tmp_path / "deepseek", config, in_fp8)
    loaded = specjax.load(folder)
    held = {name for name, leaf in leaves(loaded).items() if isinstance(leaf, Packed)}
    assert {"layer_0/mixer/kv_a/kernel", "layer_1/mlp/down", "layer_1/mlp/shared/up/kernel"} <= held
    assert not any("key_up" in name or "router" in name for name in held)
    close(loaded, specjax.load(folder, dequantise=True))


def test_one_file_says_nothing(tmp_path):
    """Older folders of modelopt describe themselves in a file of their own."""
    folder = packed_folders.write("nvfp4", "packed-modelopt")
    folders.edit(folder, drop=("quantization_config",))
    settings = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    model = specjax.load(folder)
    assert holds_packed(model.params)
    specjax.save(model, tmp_path)
    same_files(folder, tmp_path)
    assert holds_packed(specjax.load(tmp_path).params)
    tensors = packed_folders.read_tensors(folder)
    assert any(tensor.dtype == ml_dtypes.float8_e4m3fn for tensor in tensors.values())


def test_inspect_describes_packed_weights(capsys):
    """From headers: the formats, and the matrices that have them."""
    folder = packed_folders.write("fp8", "packed-mixed", plain=r"layers\.1\.|o_proj")
    main(["inspect", str(folder), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["method"] == "fp8" and told["formats"] == {"FP8": 6}
    assert told["parameters"] == specjax.load(folder).num_params
    main(["inspect", str(folder)])
    assert "fp8: 6 matrices in FP8; 15 plain tensors" in capsys.readouterr().out
