"""`load_drafter`: formats are recognised by tensors, and what does not fit is refused by name.

Nothing is compiled before a refusal, and `specjax inspect` reads no weights.
"""

import json
import pathlib
import warnings

import counted
import eagle3_folders
import eagle3_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from eagle3_cases import drafter, target
from eagle3_folders import LAYOUTS, Head, authors, deep_spec, model_opt, speculators
from heads import TINY, random_heads
from removals import check_removals

import specjax
from specjax import Chain
from specjax.cli import main

PYCODE = TINY.parent.parent / "pycode"


def write(tmp_path, config, tensors):
    return eagle3_folders.write(tmp_path / "head", config, tensors)


def test_medusa_heads_load_through_the_same_door():
    loaded = specjax.load(PYCODE / "target")
    made = specjax.load_drafter(PYCODE / "medusa", loaded)
    assert isinstance(made, specjax.MedusaAdapter)
    assert made.choices == specjax.load_medusa(PYCODE / "medusa", loaded).choices
    with pytest.raises(ValueError, match="source=<a MedusaSource>; pass a source"):
        specjax.load_drafter(PYCODE / "medusa", loaded, Chain)
    tree = specjax.load_drafter(PYCODE / "medusa", loaded, specjax.BestFirst, num_nodes=6, width=3)
    prompt, options = "import os\n", {"max_new_tokens": 12}
    drafted = specjax.generate(loaded, prompt, drafter=tree, **options)
    assert drafted.tokens == specjax.generate(loaded, prompt, **options).tokens
    assert drafted.stats.accepted > 0


def test_a_saved_bank_of_heads_is_recognised(tmp_path):
    """Also heads of two blocks, with matrices of their own."""
    loaded = specjax.load(TINY)
    heads = random_heads(loaded, 0, num_layers=2, own_heads=True)
    specjax.save_medusa(tmp_path, heads, "tiny")
    assert specjax.load_drafter(tmp_path, loaded).heads == heads.heads


GOOD = Head()


def without(name):
    return lambda tensors: tensors.pop(name)


def put(name, value):
    return lambda tensors: tensors.update({name: value})


def keep(tensors):
    pass


def short(name, rows):
    return lambda tensors: tensors.update({name: tensors[name][:rows].clone()})


TAPS = "eagle_aux_hidden_state_layer_ids"

REFUSED = {
    "a tensor is missing": (
        {}, without("midlayer.mlp.up_proj.weight"),
        r"midlayer\.mlp\.up_proj\.weight is missing \(shape \[56, 48\]\)",
    ),
    "norms that are named": (
        {"fc_norm": True}, keep, r"fc_norm\.0\.weight is missing \(shape \[48\]\)",
    ),
    "another vocabulary": (
        {"vocab_size": 400}, keep, "vocab_size is 400, and eagle3-target-llama has 320",
    ),
    "a tensor is unknown": (
        {}, put("parallel_draft_heads.0.lm_head.weight", np.zeros(3, np.float32)),
        r"parallel_draft_heads\.0\.lm_head\.weight is not a tensor of this format",
    ),
    "another shape": (
        {"intermediate_size": 57}, keep, r"gate_proj\.weight has shape \[56, 48\] instead of \[57",
    ),
    "no numbers": (
        {}, put("norm.weight", np.full(48, np.nan, np.float32)), r"norm\.weight holds 48 NaN",
    ),
    "a kind of numbers": (
        {}, put("norm.weight", np.ones(48, jnp.float8_e4m3fn)), "stored as F8_E4M3",
    ),
    "another target": (
        {"hidden_size": 64, "target_hidden_size": 64}, keep,
        r"target_hidden_size is 64, and eagle3-target-llama has 48",
    ),
    "another width without tables": (
        {"hidden_size": 64, "target_hidden_size": 48},
        put("fc.weight", np.zeros((64, 144), np.float32)),
        r"no embedding \(embed_tokens\.weight\) of its own, and its hidden size 64 is not that of",
    ),
    "another number of taps": (
        {TAPS: [2, 4]}, keep, r"fc\.weight has shape \[48, 144\].*need \[48, 96\]",
    ),
    "a layer that is not there": (
        {TAPS: [2, 4, 8]}, keep, r"layers \[2, 4, 8\], and eagle3-target-llama has 7 layers",
    ),
    "taps twice": ({TAPS: [2, 2, 4]}, keep, r"\[2, 2, 4\] must be distinct"),
    "taps out of order": ({TAPS: [4, 3, 2]}, keep, "distinct and ascending"),
    "taps of a kind": ({TAPS: "2,3,4"}, keep, '"2,3,4"; it must be a list of layers'),
    "two conventions": (
        {TAPS: [2, 3, 4], "eagle_config": {TAPS: [2, 3, 4]}}, keep,
        r"different layers.*\[2, 3, 4\].*means \[3, 4, 5\]",
    ),
    "another depth of the target": (
        {"num_target_layers": 36}, keep, "num_target_layers is 36, and eagle3-target-llama has 7",
    ),
    "a switch of ModelOpt": (
        {"eagle_config": {"use_mtp_layernorm": True}}, keep,
        "eagle_config.use_mtp_layernorm is true; it must be false, the only value",
    ),
    "another kind of layer": (
        {"model_type": "deepseek_v3"}, keep, "model_type of a drafter's layers is .deepseek_v3.",
    ),
    "a rope": (
        {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, keep, 'rope_type is "spiral"',
    ),
    "a switch that is a word": ({"norm_output": "yes"}, keep, 'norm_output is "yes"'),
    "a quantised head": (
        {"quantization_config": {"quant_method": "bitsandbytes"}}, keep, "is quantised",
    ),
    "absolute ids": (
        {}, lambda t: t.update(d2t=t["d2t"] + np.arange(200)), "d2t holds offsets",
    ),
    "tokens twice": (
        {}, lambda t: t.update(d2t=-np.arange(200)), "two draft tokens to the same",
    ),
    "tables that disagree": (
        {}, put("t2d", np.ones(320, bool)), "d2t names 200 target tokens, and t2d",
    ),
    "a table of floats": ({}, put("d2t", np.zeros(200, np.float32)), "d2t is a F32 of shape"),
    "a vocabulary without a head": ({}, without("lm_head.weight"), r"lm_head\.weight is missing"),
    "an embedding with too few tokens": (
        {}, put("embed_tokens.weight", np.ones((90, 48), np.float32)),
        "rows for 90 tokens, and .* uses 290",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(tmp_path, case):
    """With the folder, the value and the cure, before anything is compiled."""
    fields, change, message = REFUSED[case]
    tensors = GOOD.tensors(0, midlayer=True)
    change(tensors)
    folder = write(tmp_path, {**authors(GOOD), **fields}, tensors)
    loaded, _ = target("llama"), jax.random.key(0)  # its own programs do not count
    before = counted.compilations()
    with pytest.raises(ValueError, match=message) as caught:
        specjax.load_drafter(folder, loaded)
    assert str(folder) in str(caught.value)
    assert counted.compilations() == before


def test_other_folders_are_refused(tmp_path):
    """A whole model, the layers of multi-token prediction, pickled weights, a missing folder."""
    loaded = target("llama")
    with pytest.raises(ValueError, match="whole language model is loaded with specjax"):
        specjax.load_drafter(eagle3_folders.target("llama"), loaded)
    config = json.loads((eagle3_folders.target("llama") / "config.json").read_text())
    inside = write(tmp_path, config, {"mtp.other.weight": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match=r"multi-token prediction \(mtp\.\*\)"):
        specjax.load_drafter(inside, loaded)
    (inside / "model.safetensors").rename(inside / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickled weights \(pytorch_model\.bin\).*save_file"):
        specjax.load_drafter(inside, loaded)
    (inside / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"published as pytorch_model\.bin only"):
        specjax.load_drafter(inside, loaded)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        specjax.load_drafter(str(tmp_path / "nowhere"), loaded)


def test_another_target_is_refused_later():
    """`generate` checks the target, too: other sizes, and models without layers to read."""
    made, other = drafter("authors"), specjax.load(TINY)
    with pytest.raises(ValueError, match="is for a target of hidden size 48, 320 tokens and 7"):
        specjax.generate(other, [[1, 2]], drafter=made, max_new_tokens=2)
    own = specjax.LanguageModel(
        specjax.models.from_function(
            lambda params, tokens: params[tokens], vocab_size=8, max_positions=8
        ),
        np.zeros((8, 8)),
    )
    with pytest.raises(ValueError, match="reads the hidden states of a specjax Transformer"):
        specjax.load_drafter(eagle3_folders.folder("authors"), own)


def test_a_target_in_int8():
    """A head takes it, with an output matrix of its own and with the target's."""
    loaded = specjax.quantise(target("qwen3"))
    shared = eagle3_folders.folder("authors, shared")
    plain = specjax.generate(loaded, [[4, 5, 6]], max_new_tokens=6)
    for made in (
        drafter("ModelOpt", Chain, num_drafts=2),
        specjax.load_drafter(shared, loaded, Chain, num_drafts=2),
    ):
        out = specjax.generate(loaded, [[4, 5, 6]], drafter=made, max_new_tokens=6)
        assert out.tokens == plain.tokens


def test_numbers_need_a_shape():
    with pytest.raises(ValueError, match="num_drafts= are arguments of a shape"):
        specjax.load_drafter(eagle3_folders.folder("authors"), target("llama"), num_drafts=3)
    with pytest.raises(ValueError, match="num_drafts=0"):
        drafter("authors").shaped(Chain, num_drafts=0)


WARNED = {
    "norm_output in a file of SpecForge": (
        Head(), {"norm_output": True}, "up to version 0.2.0 meant the norm before the head",
    ),
    "more layers": (
        Head(), {"num_hidden_layers": 2}, "num_hidden_layers=2, and the tensors show 1",
    ),
    "a bias": (Head(), {"attention_bias": True}, "attention_bias=True, and the tensors show False"),
    "a norm": (
        Head(norm_before_fc=True), {"norm_before_fc": False},
        "norm_before_fc=False, and the tensors show True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WARNED)
def test_a_label_that_contradicts_the_tensors_gives_a_warning(tmp_path, case):
    head, fields, message = WARNED[case]
    folder = write(tmp_path, {**authors(head), **fields}, head.tensors(0, midlayer=True))
    with pytest.warns(UserWarning, match=message):
        specjax.load_drafter(folder, target("llama"))


def test_norm_output_has_two_meanings(tmp_path):
    """Present and true, drafts are fed back after the final norm, as engines serve such heads.
    Missing, they are fed back before it, as SpecForge up to 0.2.0 trains under the same words."""
    for present in (True, False):
        head = Head(fc_norm=True, norm_output=present)
        config = {**speculators(head)}
        if not present:
            del config["norm_output"]
        folder = write(tmp_path / str(present), config, head.tensors(3))
        made = specjax.load_drafter(folder, target("llama"))
        assert made.source.network.feeds_normed is present
        assert made.source.network.fc_norm


def test_prefixes_and_padding_are_read(tmp_path):
    """Names may begin with "model.", and tables may have more rows than the target has tokens."""
    head = Head(own_embedding=True, draft_vocab=None)
    tensors = head.tensors(0, midlayer=True)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.concatenate([tensors[name], np.full((32, 48), 9, np.float32)])
    renamed = {n if n == "lm_head.weight" else f"model.{n}": t for n, t in tensors.items()}
    loaded = target("llama")
    made = specjax.load_drafter(write(tmp_path, authors(head), renamed), loaded, Chain)
    out = specjax.generate(loaded, [[4, 5, 6]], drafter=made, max_new_tokens=8)
    assert out.tokens == specjax.generate(loaded, [[4, 5, 6]], max_new_tokens=8).tokens


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_names_the_tensor_that_it_lacks(layout):
    """Those of EAGLE-3."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*norm_output=true is read as it is served")
        assert check_removals(eagle3_folders.folder(layout), target(LAYOUTS[layout][3])) >= 12


@pytest.mark.parametrize("layout", eagle3_folders.PARALLEL)
def test_each_layout_of_p_eagle_names_the_tensor_that_it_lacks(layout):
    assert check_removals(eagle3_reference.parallel(layout)[0], target("llama")) > 25


@pytest.mark.parametrize("make", [authors, model_opt, speculators, deep_spec])
def test_inspect_needs_headers_only(tmp_path, make, capsys):
    """The file is cut after its header; taps are ours in every convention."""
    head = Head()
    folder = write(tmp_path, make(head), head.tensors(0, midlayer=make is authors))
    file = folder / "model.safetensors"
    size = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    with open(file, "r+b") as stream:
        whole = stream.seek(0, 2)
        stream.truncate(size)
        stream.truncate(whole)  # a hole in place of the weights
    target_folder = str(eagle3_folders.target("llama"))
    main(["inspect", str(folder), "--target", target_folder, "--json"])
    facts = json.loads(capsys.readouterr().out)
    tensors = head.tensors(0)
    weights = sum(t.size for n, t in tensors.items() if n not in ("d2t", "t2d"))
    assert facts["format"] == "eagle3" and facts["method"] == "EAGLE-3"
    assert facts["taps"] == [2, 3, 4] and facts["shares"] == ["embedding"]
    assert facts["num_drafts"] == {authors: 8, model_opt: 8, speculators: 3, deep_spec: 5}[make]
    assert facts["parameters"] == weights and facts["dtypes"] == ["F32"]
    assert facts["bytes"] == 4 * weights + 8 * 200 + 320
    main(["inspect", str(folder)])
    said = capsys.readouterr().out
    assert ("pass --target" if make is authors else "layers 2, 3, 4 (0 is the embedding)") in said
    assert f"{weights:,} parameters" in said


def test_inspect_describes_the_other_formats(capsys):
    main(["inspect", str(PYCODE / "medusa")])
    assert "its last hidden state" in capsys.readouterr().out
    main(["inspect", str(eagle3_reference.parallel("speculators")[0]), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert (facts["method"], facts["layout"]) == ("P-EAGLE", "speculators")
    main(["inspect", str(eagle3_folders.folder("speculators, 3.1")), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["method"] == "EAGLE-3.1" and "trained for org/target" in facts["details"]


def test_inspect_refuses_another_target(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["inspect", str(eagle3_folders.folder("speculators")), "--target", str(TINY)])
    assert caught.value.code == 2
    assert "vocab_size is 320, and target has 512" in capsys.readouterr().err


def test_headers_of_shards_are_read(tmp_path):
    """An index names the files, as for whole models."""
    tensors = GOOD.tensors(0, midlayer=True)
    folder = write(tmp_path, authors(GOOD), tensors)
    (folder / "model.safetensors").unlink()
    arrays = dict(tensors)
    parts = [dict(list(arrays.items())[:5]), dict(list(arrays.items())[5:])]
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for name, part in zip(names, parts, strict=True):
        safetensors.numpy.save_file(part, pathlib.Path(folder) / name)
    index = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert specjax.load_drafter(folder, target("llama")).name == "head"
