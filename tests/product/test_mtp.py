"""Layers of multi-token prediction (MTP) beside transformers, and decoding with them.

transformers runs the MTP layers of GLM and DeepSeek, and only as many drafts as there are layers.
So the reference is a decoder layer of transformers that is loaded with the MTP layer's tensors, in
the formula of DeepSeek V3's report, and computed again for every draft.
"""

from __future__ import annotations

import copy
import functools
import json
import pathlib
import shutil

import folders
import jax
import mtp_folders
import numpy as np
import pytest
import small_families
import torch
import transformers
import transformers_folders
from eagle3_driven import driven
from safetensors.numpy import load_file, save_file
from transformers.modeling_layers import MtpModel

import specjax
from specjax import Chain, DynamicTree, StaticTree
from specjax.cli import main, serve, tune
from specjax.files import headers
from specjax.models import Int8
from specjax.options.models import Models, make_drafter
from specjax.types import Block

CASES = {
    "qwen3_5": ("qwen3_5_text, in turn", "qwen", 1),
    "qwen3_5 with experts, tied": ("qwen3_5_moe_text, tied", "qwen", 1),
    "qwen3_next": ("qwen3_next, all sparse", "qwen", 1),
    "glm4_moe": ("glm4_moe, groups", "deepseek", 1),
    "glm4_moe_lite": ("glm4_moe_lite, plain", "deepseek", 1),
    "deepseek_v3": ("deepseek_v3, yarn, groups", "deepseek", 1),
    "ernie4_5_moe": ("ernie4_5_moe, a dense layer", "ernie", 0),
    "nemotron_h": ("nemotron_h, experts", "nemotron", 2),
    "mimo": ("mimo, biases", "mimo", 0),
}
"""Family -> the case of `small_families`, the layout, and the layer with the same shapes."""

SEVERAL = {"glm4_moe": 3, "deepseek_v3": 2}
"""Families -> the number of MTP layers of a folder with several."""

PROMPTS = [small_families.text()[0][:30].tolist(), small_families.text()[0][40:47].tolist()]
PATH = (7, 3, 11)
NEW = 24


@functools.cache
def target(name: str) -> specjax.LanguageModel:
    return specjax.load(mtp_folders.folder(*CASES[name]))


@functools.cache
def several(name: str) -> specjax.LanguageModel:
    return specjax.load(mtp_folders.folder(*CASES[name], True, SEVERAL[name]))


class Theirs:
    """What the layer says in transformers' modules."""

    def __init__(self, name: str) -> None:
        case, layout, like = CASES[name]
        folder = mtp_folders.folder(case, layout, like)
        self.main = _model(folder)
        tensors = load_file(folder / "model.safetensors")
        depth = self.main.config.num_hidden_layers
        block, project, *norms = (each.format(depth) for each in mtp_folders.NAMES[layout])
        likes = mtp_folders.blocks(layout, block, like)
        moved = {
            theirs + key.removeprefix(stem): tensor
            for stem, theirs in likes.items()
            for key, tensor in tensors.items()
            if key.startswith(stem) and theirs + key.removeprefix(stem) in tensors
        }
        made = folders.ROOT / f"moved-{folder.name}"
        made.mkdir(exist_ok=True)
        (made / "config.json").write_text((folder / "config.json").read_text())
        save_file({**tensors, **moved}, made / "model.safetensors", {"format": "pt"})
        changed = _model(made)
        self.layers = changed.model.layers[like : like + len(likes)]
        self.rotary = getattr(changed.model, "rotary_emb", None)
        final = changed.model.norm_f if layout == "nemotron" else changed.model.norm
        self.project = torch.from_numpy(tensors[f"{project}.weight"])
        self.hidden_first = layout == "mimo"
        self.norms = []
        for norm in norms:
            own = copy.deepcopy(final)
            own.weight.data = torch.from_numpy(tensors[f"{norm}.weight"])
            self.norms.append(own)

    def hidden(self, text: list[int]) -> torch.Tensor:
        """[1, T, E] of the target, after its final norm."""
        found = self.main(torch.tensor([text]), output_hidden_states=True)
        return found.hidden_states[-1]

    def logits(self, text: list[int], path: tuple[int, ...], feeds_normed: bool = True):
        """[V] after a text, whose last token is pending, and the drafts of a path below it."""
        hidden, tokens = self.hidden(text[:-1]), [*text[1:]]
        for token in (*path, None):
            embedded = self.main.get_input_embeddings()(torch.tensor([tokens]))
            parts = [self.norms[0](embedded), self.norms[1](hidden)]
            both = torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1)
            x, positions = both @ self.project.T, torch.arange(len(tokens))[None]
            turned = self.rotary and self.rotary(x, position_ids=positions)
            for layer in self.layers:
                x = layer(x, position_embeddings=turned, position_ids=positions)
                x = x[0] if isinstance(x, tuple) else x
            normed = self.norms[2](x) if len(self.norms) > 2 else x
            if token is None:
                return self.main.lm_head(normed[0, -1]).numpy()
            fed = normed if feeds_normed else x
            hidden = torch.cat([hidden, fed[:, -1:]], dim=1)
            tokens = [*tokens, token]
        raise AssertionError


def _model(folder: pathlib.Path) -> transformers.PreTrainedModel:
    fields, more = json.loads((folder / "config.json").read_text()), {}
    if (family := fields.pop("model_type")) in transformers_folders.THEIRS:
        more = {"config": transformers_folders.configured(family, **fields)}
    made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more)
    return made.eval().requires_grad_(False)


@functools.cache
def theirs(name: str) -> Theirs:
    return Theirs(name)


def ours(
    model: specjax.LanguageModel, text: list[int], path: tuple[int, ...], **switches: bool
) -> list[np.ndarray]:
    """The logits [V] after a text and after each draft of a path below it."""
    drafter = specjax.load_mtp(model, **switches)
    source, params = drafter.source, drafter.arrays(model)
    tokens = np.array([text[:-1]], np.int32)
    positions = np.arange(tokens.shape[1])[None]
    read = model.model.apply(model.params, tokens, positions, taps=source.taps)
    count = np.array([tokens.shape[1]], np.int32)
    block = Block(tokens, read.hidden, count, read.features)
    chain = Chain(source, len(path) + 1)
    state = driven(chain)[0](params, block)
    _, reading, logits = source.begin(params, state, _Pending(np.array([text[-1]], np.int32)))
    found = [logits[0]]
    for token in path:
        reading, logits = source.extend(params, reading, np.array([token], np.int32))
        found.append(logits[0])
    return [np.asarray(row) for row in found]


class _Pending:
    def __init__(self, pending: np.ndarray) -> None:
        self.pending = pending


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name):
    """After the pending token, and after each draft, for both kinds of what is fed back."""
    for switches in ({}, {"feeds_normed": False}):
        for prompt in PROMPTS:
            for depth, row in enumerate(ours(target(name), prompt, PATH, **switches)):
                wanted = theirs(name).logits(prompt, PATH[:depth], *switches.values())
                within = 1e-4 * np.abs(wanted).max()
                np.testing.assert_allclose(row, wanted, 0, within, err_msg=f"depth {depth}")


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_the_first_draft_is_that_of_use_mtp(name):
    """transformers' own class for these layers, which drafts as many tokens as it has layers."""
    main = theirs(name).main
    main.config.num_mtp_layers = 1
    depth = main.config.num_hidden_layers  # the class knows the depths of published models only
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{depth}\."]
    layer = MtpModel.from_pretrained(main).eval()
    for text in PROMPTS:
        hidden, positions = theirs(name).hidden(text[:-1]), torch.arange(1, len(text))[None]
        with torch.no_grad():
            found = layer(torch.tensor([text[1:]]), hidden, None, positions, _cache(main))[1]
        wanted = found[0, 0].numpy()
        within = 1e-4 * np.abs(wanted).max()
        np.testing.assert_allclose(ours(target(name), text, ())[0], wanted, 0, within)


@pytest.mark.parametrize("name", SEVERAL)
def test_several_layers_draft_as_in_use_mtp(name):
    """One draft of each layer, the greedy ones of transformers' own class."""
    count, main = SEVERAL[name], _model(mtp_folders.folder(*CASES[name], True, SEVERAL[name]))
    main.config.num_mtp_layers, depth = count, main.config.num_hidden_layers
    main._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{depth + k}\." for k in range(count)
    ]
    layers = MtpModel.from_pretrained(main).eval()
    for text in PROMPTS:
        hidden = main(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1]
        positions = torch.arange(1, len(text))[None]
        with torch.no_grad():
            drafts, found, _ = layers(
                torch.tensor([text[1:]]), hidden, None, positions, _cache(main)
            )
        path = tuple(drafts[0, :-1].tolist())
        for wanted, mine in zip(found[0].numpy(), ours(several(name), text, path), strict=True):
            np.testing.assert_allclose(mine, wanted, 0, 1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("name", SEVERAL)
def test_several_layers_leave_the_text(name, tmp_path):
    """As chains and trees, deeper than they are, and after they were written and read again."""
    model = several(name)
    assert model.mtp == SEVERAL[name]
    drafter = specjax.load_mtp(model)
    assert drafter.proposer.max_depth == 3
    with pytest.raises(ValueError, match=r"layout 'qwen' cannot hold.*has several layers"):
        specjax.save_drafter(tmp_path, drafter, model, layout="qwen")
    specjax.save_drafter(tmp_path, drafter, model, layout="deepseek")
    again = specjax.load_drafter(tmp_path, model)
    for mine, its in zip(*(jax.tree.leaves(one.params) for one in (drafter, again)), strict=True):
        np.testing.assert_array_equal(mine, its)
    drafters = [
        {"proposer": "mtp", "num_drafts": SEVERAL[name] + 2},
        {"drafter": specjax.load_mtp(model, Chain, num_drafts=4, confidence_threshold=0.05)},
        {"drafter": specjax.load_mtp(model, DynamicTree, depth=4, width=3, num_nodes=8)},
        {},
    ]
    for settings in ({}, {"temperature": 1.0, "seed": 3}):
        settings = {**settings, "max_new_tokens": NEW, "eos": []}
        plain = specjax.generate(model, PROMPTS, num_drafts=0, **settings)
        for how in drafters:
            found = specjax.generate(model, PROMPTS, **how, **settings)
            assert [list(row) for row in found.tokens] == [list(row) for row in plain.tokens]


def _cache(main: transformers.PreTrainedModel):
    return transformers.cache_utils.MtpCache(config=main.config.get_mtp_config())


@pytest.mark.parametrize("name", CASES)
def test_text_is_that_of_plain_decoding(name):
    """Greedy and sampled, as a chain and as trees, and as `auto` drafts."""
    model = target(name)
    assert model.mtp == 1
    drafters = [
        {"proposer": "mtp", "num_drafts": 3},
        {"drafter": specjax.load_mtp(model, StaticTree, branching=(3, 2))},
        {"drafter": specjax.load_mtp(model, DynamicTree, depth=3, width=3, num_nodes=8)},
        {},
    ]
    for settings in ({}, {"temperature": 1.0, "seed": 3}):
        settings = {**settings, "max_new_tokens": NEW, "eos": []}
        plain = specjax.generate(model, PROMPTS, num_drafts=0, **settings)
        for drafter in drafters:
            found = specjax.generate(model, PROMPTS, **drafter, **settings)
            assert [list(row) for row in found.tokens] == [list(row) for row in plain.tokens]


def test_copies_of_the_tables_are_not_read():
    """DeepSeek's files repeat the target's embedding and head; ours differ, so reading is seen."""
    case = CASES["deepseek_v3"]
    copied = specjax.load(mtp_folders.folder(*case, copies=True))
    one, other = (specjax.load_mtp(model) for model in (copied, target("deepseek_v3")))
    for mine, its in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("name", CASES)
def test_a_saved_layer_is_read_again(name, tmp_path):
    """By its folder alone, in every layout that can hold it."""
    model = target(name)
    drafter = specjax.load_mtp(model)
    own = {"ernie4_5_moe": {"ernie"}, "nemotron_h": {"nemotron"}, "mimo": {"mimo"}}
    layouts = own.get(name, {"qwen", "deepseek"})
    for layout in sorted(layouts):
        specjax.save_drafter(tmp_path / layout, drafter, model, layout=layout)
        again = specjax.load_drafter(tmp_path / layout, model)
        assert again.proposer == drafter.proposer
        for mine, its in zip(
            jax.tree.leaves(again.params), jax.tree.leaves(drafter.params), strict=True
        ):
            np.testing.assert_array_equal(mine, its)


def test_a_plain_layer_drafts_for_a_packed_target(tmp_path, capsys):
    """Folders of packed weights leave the MTP layer as it is."""
    case = ("qwen3_5_text, in turn", "qwen", 1)
    plain = mtp_folders.folder(*case)
    packed = specjax.load(plain, dtype="int4")
    specjax.save(packed, tmp_path)
    stored, mine = load_file(tmp_path / "model.safetensors"), load_file(plain / "model.safetensors")
    layer = {name: tensor for name, tensor in mine.items() if name.startswith("mtp.")}
    save_file({**stored, **layer}, tmp_path / "model.safetensors", {"format": "pt"})
    model = specjax.load(tmp_path)
    assert model.mtp == 1
    main(["inspect", str(tmp_path), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["format"] == "mtp" and told["packed"]["method"] == "compressed-tensors"
    main(["inspect", str(tmp_path)])
    said = capsys.readouterr().out
    assert "layout of" in said and "matrices in compressed-tensors int4" in said
    pair = [specjax.load_mtp(each).params for each in (model, target("qwen3_5"))]
    for one, other in zip(*map(jax.tree.leaves, pair), strict=True):
        np.testing.assert_array_equal(one, other)
    settings = {"max_new_tokens": NEW, "eos": [], "temperature": 1.0}
    wanted = specjax.generate(model, PROMPTS, num_drafts=0, **settings)
    found = specjax.generate(model, PROMPTS, proposer="mtp", **settings)
    assert [list(row) for row in found.tokens] == [list(row) for row in wanted.tokens]


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5 with experts, tied"])
def test_a_plain_layer_drafts_for_a_target_in_int8(name):
    """With the target's own output matrix in int8, or its tied embedding."""
    model = specjax.quantise(target(name))
    settings = {"max_new_tokens": NEW, "eos": [], "temperature": 1.0}
    wanted = specjax.generate(model, PROMPTS, num_drafts=0, **settings)
    for drafter in ({"proposer": "mtp"}, {"drafter": specjax.load_mtp(model, head_tokens=30)}):
        found = specjax.generate(model, PROMPTS, **drafter, **settings)
        assert [list(row) for row in found.tokens] == [list(row) for row in wanted.tokens]
        assert found.stats.accepted > 0


@pytest.mark.parametrize("name", ["mimo", "glm4_moe"])
def test_layers_in_int8_leave_the_text(name):
    """One layer, and several, each of whose matrices is rounded."""
    main = several(name) if name in SEVERAL else target(name)
    whole, drafter = (
        specjax.load_drafter(main.folder, main, dtype=dtype) for dtype in (None, "int8")
    )

    def boxed(leaf):
        return isinstance(leaf, Int8)

    leaves = jax.tree.leaves(drafter.params, is_leaf=boxed)
    assert sum(map(boxed, leaves)) == sum(leaf.ndim == 2 for leaf in jax.tree.leaves(whole.params))
    how = {"max_new_tokens": NEW}
    made = specjax.generate(main, PROMPTS, drafter=drafter, **how)
    assert made.tokens == specjax.generate(main, PROMPTS, proposer="none", **how).tokens


def test_a_target_without_a_layer_is_refused():
    """The error says what to pass instead."""
    model = specjax.load(small_families.folder("qwen3_5_text, in turn"))
    with pytest.raises(ValueError, match=r"no layer of multi-token prediction.*pass draft="):
        specjax.generate(model, PROMPTS, proposer="mtp")


def test_a_drafter_of_another_target_is_refused(tmp_path):
    """By its sizes, before a weight is read."""
    specjax.save_drafter(
        tmp_path, specjax.load_mtp(target("glm4_moe")), target("glm4_moe"), layout="qwen"
    )
    with pytest.raises(ValueError, match=r"(?s)MTP layer of another target.*number of layers"):
        specjax.load_drafter(tmp_path, target("qwen3_5"))


def test_a_server_and_a_command_offer_the_layer():
    """By the options `--mtp` and `--proposer mtp`; the numbers of a tree make one."""
    model = target("qwen3_5")
    options = serve.ServeOptions(mtp=True, lookup=False, num_drafts=2)
    offered = serve._given(options, model, None, [], [])
    assert list(offered) == ["mtp"] and offered["mtp"].proposer.max_depth == 2
    tree = make_drafter("mtp", Models(model, None, None, None), {"num_nodes": 6, "width": 2})
    assert tree.proposer.num_nodes == 6 and not tree.proposer.is_chain


def test_auto_goes_on_without_a_layer_that_cannot_be_read(tmp_path):
    """It warns, since nobody asked for the layer, and `proposer="mtp"` is refused."""
    folder = mtp_folders.folder(*CASES["qwen3_5"])
    shutil.copytree(folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["mtp.norm.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    model = specjax.load(tmp_path / "model")
    with pytest.warns(UserWarning, match=r"(?s)auto drafts without the MTP layer.*mtp\.norm"):
        specjax.generate(model, PROMPTS, max_new_tokens=2, eos=[])
    with pytest.raises(ValueError, match=r"mtp\.norm"):
        specjax.generate(model, PROMPTS, proposer="mtp")


def test_a_header_is_read_once_a_call(monkeypatch):
    """Of a tied model, whose head is looked for, with an MTP layer, which is looked for too."""
    folder, kept, read = mtp_folders.folder(*CASES["qwen3_5 with experts, tied"]), headers._read, []
    monkeypatch.setattr(headers, "_read", lambda file: read.append(file) or kept(file))
    model = specjax.load(folder)
    assert read == [folder / "model.safetensors"]
    specjax.load_mtp(model)
    assert read == [folder / "model.safetensors"] * 2


def test_tune_measures_the_switches(capsys):
    """A row of its table for each form of the layer, with the tokens that a pass then gives."""
    folder = str(mtp_folders.folder(*CASES["glm4_moe"]))
    options = ["--max-new-tokens", "6", "--rounds", "1", "--no-save", "--json"]
    tune.main("specjax tune", ["--target", folder, "--mtp", *options])
    found = json.loads(capsys.readouterr().out)["candidates"]
    forms = {one["name"]: one["tokens_per_pass"] for one in found if "zeroes_first" in one["name"]}
    assert {name.partition(" zeroes")[2] for name in forms} == {"_first=True"}
    assert len(forms) == 2 and min(forms.values()) >= 1
