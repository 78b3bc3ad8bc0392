"""Folders of block drafts: what is recognised, what is refused, and the sizes of published ones."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import published
import pytest
import safetensors.numpy
from published_target import context, load, target, write, write_fixture
from started import started

from specjax import LanguageModel, LinenModel, Transformer, TransformerConfig
from specjax.drafters.folder import load_drafter, open_drafter, save_drafter
from specjax.files.headers import Stored
from specjax.methods import FORMATS, SharedParams
from specjax.methods.block import dflash, dspark
from specjax.methods.block.reader import plan_block_draft
from specjax.types import Block

KINDS = {
    "dflash": ("dflash", "DFlash", "SpecForge or z-lab", 4),
    "dflash_sliding": ("dflash", "DFlash", "SpecForge or z-lab", 3),
    "jetspec": ("dflash", "DFlash", "SpecForge or z-lab", 3),
    "dflash2": ("dflash", "DFlash-2", "SpecForge or z-lab", 4),
    "dspark_vanilla": ("dspark", "DSpark", "SpecForge or z-lab", 4),
    "dspark_gated": ("dspark", "DSpark", "SpecForge or z-lab", 4),
    "dspark_rnn": ("dspark", "DSpark", "SpecForge or z-lab", 4),
    "domino_shifted": ("domino", "Domino", "SpecForge or z-lab", 4),
    "domino_plain": ("domino", "Domino", "SpecForge or z-lab", 3),
    "speculators_dflash": ("dflash", "DFlash", "speculators", 3),
    "speculators_dflash_sliding": ("dflash", "DFlash", "speculators", 4),
    "speculators_dspark": ("dspark", "DSpark", "speculators", 4),
    "speculators_dflash2": ("dflash", "DFlash-2", "speculators", 3),
}


def test_every_fixture_is_named():
    assert set(KINDS) == set(published.NAMES)


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_describes_itself(name, tmp_path):
    """The format, the method, the packaging, the layers that it reads, and its drafts."""
    folder = write_fixture(tmp_path, name)
    format, config, tensors = open_drafter(folder)
    said = FORMATS[format].describe(config, tensors, target())
    assert (format, said.method, said.packaging, said.num_drafts) == KINDS[name]
    drafter = load_drafter(folder, target())
    assert said.taps == drafter.source.taps == (1, 3)
    assert drafter.source.depth == said.num_drafts
    own = {"speculators_dflash", "speculators_dspark"}
    # A head of a reduced vocabulary is its own; an embedding that repeats the target's is not held.
    assert drafter.shares == (("embedding",) if name in own else ("embedding", "head"))


def rewrite(folder, change):
    """Rewrite the tensors of a folder."""
    file = folder / "model.safetensors"
    safetensors.numpy.save_file(change(safetensors.numpy.load_file(file)), file)
    return folder


def test_older_names_are_read(tmp_path):
    """Heads below `logit_head.`, layers below `model.`, and the names of an encoder."""
    plain = load(tmp_path / "plain", "dspark_rnn")
    for number, rename in enumerate(
        (
            lambda n: f"logit_head.{n}" if n.split(".")[0] in ("markov_head", "confidence_head")
            else n,
            lambda n: f"model.{n}",
            lambda n: {"fc.weight": "encoder.fc.weight",
                       "hidden_norm.weight": "encoder.output_norm_enc.weight"}.get(n, n),
        )
    ):  # fmt: skip
        folder = write_fixture(tmp_path / str(number), "dspark_rnn")
        rewrite(folder, lambda held, rename=rename: {rename(n): x for n, x in held.items()})
        other = load_drafter(folder, target())
        assert other.source == plain.source
        jax.tree.map(np.testing.assert_array_equal, other.params, plain.params)


def test_a_flat_configuration_is_read(tmp_path):
    """DeepSpec's: all fields at the top level, and tables in the file that repeat the target's."""
    nested = load(tmp_path / "nested", "dspark_gated")
    made = published.fixture("dspark_gated")
    config = {**made["config"], **made["config"]["dflash_config"]}
    config |= {"architectures": ["Qwen3DSparkModel"]}
    del config["dflash_config"], config["projector_type"]
    tables = {"embed_tokens.weight": published.embedding(), "lm_head.weight": published.head()}
    folder = write(tmp_path / "flat", config, {**published.weights(made["tensors"]), **tables})
    flat = load_drafter(folder, target())
    assert (flat.source, flat.shares) == (nested.source, nested.shares)
    jax.tree.map(np.testing.assert_array_equal, flat.params, nested.params)
    format, config, tensors = open_drafter(folder)
    assert FORMATS[format].describe(config, tensors, None).packaging == "DeepSpec"


def test_the_tensors_count(tmp_path):
    """A label of another method gives a warning, and the draft is what its tensors are."""
    with pytest.warns(UserWarning, match="says dflash, and the tensors show domino"):
        drafter = load(tmp_path, "domino_plain", architectures=["DFlashDraftModel"],
                       dflash_config={**published.fixture("domino_plain")["config"][
                           "dflash_config"], "projector_type": "dflash"})  # fmt: skip
    assert type(drafter.source.correction).__name__ == "PrefixGRU"


def test_tables_of_its_own_are_kept(tmp_path):
    """An embedding and a head that differ from the target's are the draft's own."""
    folder = write_fixture(tmp_path, "dspark_vanilla")
    table, head = published.embedding() + 1, published.head() + 1
    rewrite(folder, lambda held: held | {"embed_tokens.weight": table, "lm_head.weight": head})
    drafter = load_drafter(folder, target())
    assert drafter.shares == ()
    np.testing.assert_array_equal(drafter.params["embedding"], table)
    np.testing.assert_array_equal(drafter.params["head"]["kernel"], head.T)


TAPS = {
    # speculators counts hidden states, z-lab and DeepSpec outputs of layers.
    "aux_hidden_state_layer_ids": ([1, 3], (1, 3)),
    "target_layer_ids": ([0, 2], (1, 3)),
    "dspark_target_layer_ids": ([-1, 2], (0, 3)),
}


@pytest.mark.parametrize("key", TAPS)
def test_conventions_of_layers(key, tmp_path):
    """Each field counts in its own way; the embedding is -1 where outputs are counted."""
    ids, taps = TAPS[key]
    nested = {**published.fixture("dflash")["config"]["dflash_config"], key: ids}
    nested = {name: x for name, x in nested.items() if name == key or name not in TAPS}
    assert load(tmp_path, "dflash", dflash_config=nested).source.taps == taps


def test_the_last_layer_is_read_as_it_was_trained(tmp_path):
    """z-lab reads it after the final norm, and says so nowhere; DeepSpec and speculators before."""
    nested = {"mask_token_id": 27, "target_layer_ids": [0, 3]}
    with pytest.warns(UserWarning, match=r"after the final norm.*_ids=\[1, 4\] instead"):
        drafter = load(tmp_path / "z-lab", "dflash", dflash_config=nested)
    assert drafter.source.taps == (1, 5)
    save_drafter(tmp_path / "written", drafter, target())
    written = json.loads((tmp_path / "written" / "config.json").read_text())
    assert written["dflash_config"]["target_layer_ids"] == [0, 3]
    with pytest.raises(ValueError, match="reads the target's last state after the final norm"):
        save_drafter(tmp_path / "other", drafter, target(), "speculators")
    _, config, tensors = open_drafter(tmp_path / "written")
    assert FORMATS["dflash"].describe(config, tensors, None).taps == (1, 5)

    named = {"mask_token_id": 27, "aux_hidden_state_layer_ids": [1, 4]}
    other = load(tmp_path / "speculators", "dflash", dflash_config=named)
    assert other.source.taps == (1, 4)
    with pytest.raises(ValueError, match="reads the target's last layer before the final norm"):
        save_drafter(tmp_path / "other", other, target(), "z-lab")
    made = published.fixture("dspark_gated")["config"]
    flat = {**made, **made["dflash_config"], "target_layer_ids": [0, 3]}
    del flat["dflash_config"]
    tensors = published.weights(published.fixture("dspark_gated")["tensors"])
    folder = write(tmp_path / "deepspec", flat, tensors)
    assert load_drafter(folder, target()).source.taps == (1, 4)


def test_without_layers_they_are_spread(tmp_path):
    """As z-lab spreads them: a draft of two layers reads the outputs of layers 1 and L - 3."""
    drafter = load(tmp_path, "dflash", dflash_config={"mask_token_id": 27})
    assert drafter.source.taps == (2, 2)


REFUSED = {
    "block_size=1; it must be at least 2: a block holds the anchor": {"block_size": 1},
    "block_size is 0; it must be a whole number": {"block_size": 0},
    "different layers of the target.*aux_hidden_state_layer_ids": {
        "aux_hidden_state_layer_ids": [0, 2]
    },
    r"layers \[1, 9\], and toy target has 4": {
        "dflash_config": {"mask_token_id": 27, "target_layer_ids": [0, 8]}
    },
    r"mask_token_id=29; it must lie in \[0, 28\], the rows of the embedding": {
        "dflash_config": {"mask_token_id": 29, "target_layer_ids": [0, 2]}
    },
    "mask_token_id is null; it must be": {"dflash_config": {"target_layer_ids": [0, 2]}},
    "attention_sink_bias is true; it must be false": {"attention_sink_bias": True},
    r"layer_types is \[\"full_attention\"\]": {"layer_types": ["full_attention"]},
    "sliding_window is null; it must be a whole number": {
        "layer_types": ["sliding_attention"] * 2, "use_sliding_window": True,
        "sliding_window": None,
    },
    "fc.weight has shape": {
        "dflash_config": {"mask_token_id": 27, "target_layer_ids": [0, 1, 2]}
    },
    'is_causal is "false"; it must be true or false': {"is_causal": "false"},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message, tmp_path):
    """The message names the value, and the folder, before anything is compiled."""
    with pytest.raises(ValueError, match=message):
        load(tmp_path, "dflash", **REFUSED[message])


def test_tensors_that_do_not_fit_are_named(tmp_path):
    """Those that are missing, unknown, or belong to another kind of head."""
    folder = write_fixture(tmp_path / "a", "dflash")
    rewrite(folder, lambda held: {"other.weight": held.pop("norm.weight"), **held})
    with pytest.raises(ValueError, match=r"(?s)norm.weight is missing.*other.weight is not a"):
        load_drafter(folder, target())
    with pytest.raises(ValueError, match="markov_head_type is 'vanilla', and the file holds"):
        config = published.fixture("dspark_rnn")["config"]["dflash_config"]
        load(tmp_path / "b", "dspark_rnn", dflash_config={**config, "markov_head_type": "vanilla"})
    folder = write_fixture(tmp_path / "c", "dflash")
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"mask_embedding.pt.*pickled"):
        load_drafter(folder, target())
    folder = write_fixture(tmp_path / "d", "speculators_dflash")
    rewrite(folder, lambda held: {n: x for n, x in held.items() if n != "lm_head.weight"})
    with pytest.raises(ValueError, match=r"12 tokens, and lm_head.weight is missing"):
        load_drafter(folder, target())


def test_a_threshold_needs_a_confidence_head(tmp_path):
    """A draft without the head refuses it by name."""
    source = load(tmp_path, "dflash").source
    with pytest.raises(ValueError, match=r"confidence_threshold=0.5 needs a confidence head"):
        dataclasses.replace(source, confidence_threshold=0.5)


# --- published sizes ------------------------------------------------------------------------------


def header(hidden, inner, queries, keys, dim, taps, layers=5, **extra):
    """The tensors of a published file by name, in the layout of files."""
    shapes = {"fc.weight": (hidden, taps * hidden), "hidden_norm.weight": (hidden,)}
    shapes["norm.weight"] = (hidden,)
    for i in range(layers):
        one = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries * dim, hidden), "self_attn.k_proj": (keys * dim, hidden),
            "self_attn.v_proj": (keys * dim, hidden), "self_attn.o_proj": (hidden, queries * dim),
            "self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in one.items()}
        for name, shape in extra.get("each", {}).items():
            shapes[f"layers.{i}.{name}"] = shape
    return shapes | extra.get("once", {})


def abstract_target(hidden, vocab, layers):
    config = TransformerConfig(vocab, hidden, 64, layers, 2, 1, 8, 64)
    model = LinenModel(Transformer(config))
    params = jax.eval_shape(model.init, jax.random.key(0))
    return LanguageModel(model, params, name="published target")


# z-lab/dflash, tests/fixtures: dflash2-config.json and dflash2-safetensors-header.json.
DFLASH2 = {
    "architectures": ["DFlash2DraftModel"], "is_causal": False, "model_type": "qwen3",
    "dflash_config": {
        "block_size": 16, "conv_group_size": 16, "conv_kernel_size": 2,
        "final_logit_softcapping": 20.0, "mask_token_id": 201818,
        "output_multiplier": 0.19611613513818404, "selector_rank": 256, "selector_top_k": 16,
        "target_layer_ids": [1, 13, 25, 37, 49],
    },
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 6656, "intermediate_size": 19968,
    "layer_types": ["sliding_attention"] * 5, "max_position_embeddings": 131072,
    "num_attention_heads": 32, "num_hidden_layers": 5, "num_key_value_heads": 8,
    "num_target_layers": 52, "rms_norm_eps": 1e-5, "sliding_window": 2048,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "tie_word_embeddings": False, "use_sliding_window": True, "vocab_size": 202048,
}  # fmt: skip
_CONV = {"base_kernel": (2, 2, 6656), "kernel_projection.weight": (1664, 6656)}
DFLASH2_HEADER = header(
    6656, 19968, 32, 8, 128, 5,
    each={f"{at}_conv.{name}": x for at in ("attention", "mlp") for name, x in _CONV.items()},
    once={
        "candidate_selector.hidden_projection.weight": (256, 6656),
        "candidate_selector.predecessor_codebook": (202048, 256),
        "candidate_selector.successor_codebook": (202048, 256),
    },
)  # fmt: skip

# The sizes of RadixArk/Kimi-K3-DSpark, as a public test of its exact shapes lists them.
DSPARK = {
    "architectures": ["DSparkDraftModel"], "model_type": "qwen3", "hidden_size": 7168,
    "dflash_config": {
        "projector_type": "dspark", "mask_token_id": 163824, "markov_rank": 256,
        "target_layer_ids": [7, 23, 51, 67, 83], "confidence_head_with_markov": True,
    },
    "block_size": 8, "intermediate_size": 14336, "num_attention_heads": 64, "head_dim": 64,
    "num_key_value_heads": 16, "num_hidden_layers": 5, "vocab_size": 163840,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 4096,
}  # fmt: skip
DSPARK_HEADER = header(
    7168, 14336, 64, 16, 64, 5,
    once={
        "markov_head.markov_w1.weight": (163840, 256),
        "markov_head.markov_w2.weight": (163840, 256),
        "confidence_head.proj.weight": (1, 7168 + 256), "confidence_head.proj.bias": (1,),
    },
)  # fmt: skip

PUBLISHED = {
    "DFlash-2": (DFLASH2, DFLASH2_HEADER, dflash.METHOD, (6656, 202048, 52), 81, 2_772_159_744),
    "DSpark": (DSPARK, DSPARK_HEADER, dspark.METHOD, (7168, 163840, 88), 62, 2_249_289_601),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_are_accepted(name):
    """Every tensor of the published header has its place, and the parameters are as many; no weight
    is read and none is made."""
    config, shapes, method, sizes, tensors, parameters = PUBLISHED[name]
    assert len(shapes) == tensors
    assert sum(map(np.prod, shapes.values())) == parameters
    stored = {
        tensor: Stored(pathlib.Path("absent"), "BF16", shape, 0) for tensor, shape in shapes.items()
    }
    assert next(n for n, f in FORMATS.items() if f.matches(config, stored)) == (
        "dflash" if name == "DFlash-2" else "dspark"
    )
    plan = plan_block_draft(pathlib.Path("folder"), config, stored, abstract_target(*sizes), method)
    assert plan.shares == ("embedding", "head")
    assert {row.name for row in plan.table.rows} == set(shapes)
    assert {row.path for row in plan.table.rows} == set(plan.table.shapes)
    for row in plan.table.rows:
        shape = plan.table.shapes[row.path]
        assert shapes[row.name] == (shape[::-1] if row.transpose else shape)
    own = {}
    for path, shape in plan.table.shapes.items():
        at = own
        for part in path[:-1]:
            at = at.setdefault(part, {})
        at[path[-1]] = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    assert sum(x.size for x in jax.tree.leaves(own)) == parameters
    # One block of these sizes, without numbers.
    source, (hidden, vocab, _) = plan.source, sizes
    assert source.depth == (15 if name == "DFlash-2" else 8)
    table = jax.ShapeDtypeStruct((vocab, hidden), jnp.bfloat16)
    features = jax.ShapeDtypeStruct((1, 4, 5 * hidden), jnp.bfloat16)

    def logits(params, features):
        count = jnp.array([4])
        prompt = Block(jnp.zeros((1, 4), jnp.int32), features[..., :hidden], count, features)
        state = started(source, params, prompt, 32)
        first, _, reading = source.marginals(params, state, context([1]))
        previous = jnp.array([[1, 2]])
        return first, source.correct(params, reading, 0, previous, None).logits

    made = jax.eval_shape(logits, SharedParams(own, {"embedding": table}), features)
    assert [x.shape for x in made] == [(1, source.depth, vocab), (1, 2, vocab)]
