"""Every family against transformers: the same folder gives the same logits over 500 tokens and
the same text."""

import dataclasses
import json

import delta_families
import dense_families
import expert_families
import folders
import gemma4_families
import jax
import jax.numpy as jnp
import latent_families
import numpy as np
import pytest
import recurrent_families
import torch
import transformers
import transformers_folders
from test_models import assert_parity, ours, theirs

import specjax
from specjax import tree
from specjax._internal.mappings import mapped


@pytest.fixture(autouse=True)
def _room_for_the_next_family():
    """A family has 1600 memory mappings of programs; `conftest.py` looks after a whole file."""
    yield
    if mapped() > 0.4:
        jax.clear_caches()


SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 640,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 24}
EXPERTS = {**HEADS, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GEMMA = {**HEADS, "query_pre_attn_scalar": 20, "sliding_window": 33}
OPT = {
    "vocab_size": 96, "hidden_size": 64, "ffn_dim": 72, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 640, "init_std": 0.15,
    "word_embed_proj_dim": 64, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
GPT2 = {
    "vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 640,
    "initializer_range": 0.15, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 160,
}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
    "short_factor": [1.1, 1.3, 2.0, 2.5], "long_factor": [3.0, 4.0, 5.0, 6.0],
}  # fmt: skip
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}

# family -> name of a case -> configuration for transformers; the first case of a family is also
# decoded.
CONFIGS = {
    "mistral": {
        "window": {**GROUPED, "sliding_window": 37},
        "no window": {**HEADS, "sliding_window": None},
    },
    "mixtral": {
        "two of four": {**GROUPED, "num_local_experts": 4},
        "one of three, window": {
            **GROUPED, "num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 50
        },
    },
    "qwen2": {
        "plain": GROUPED,
        "windows above, tied": {
            **GROUPED, "use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
        "yarn": {**GROUPED, "rope_parameters": YARN},
    },
    "qwen3": {
        "plain": HEADS,
        "bias": {**HEADS, "attention_bias": True, "tie_word_embeddings": True},
    },
    "qwen3_moe": {
        "a dense layer": {**EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": True},
        "every other, window": {
            **EXPERTS, "decoder_sparse_step": 2, "norm_topk_prob": False,
            "use_sliding_window": True, "sliding_window": 40,
        },
    },
    "gemma": {"plain": HEADS},
    "gemma2": {"caps": {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}},
    "gemma3_text": {
        "seven layers": {**GEMMA, "num_hidden_layers": 7},
        "two ropes": {
            **GEMMA, "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": TWO_ROPES
        },
    },
    "phi3": {
        "plain": GROUPED,
        "long rope, window": {
            **GROUPED, "max_position_embeddings": 4096, "original_max_position_embeddings": 512,
            "partial_rotary_factor": 0.5, "sliding_window": 100, "rope_parameters": LONG,
        },
    },
    "opt": {
        "norms before": OPT,
        "norms behind, projected": {
            **OPT, "word_embed_proj_dim": 24, "do_layer_norm_before": False
        },
    },
    "gpt2": {"plain": GPT2, "inner": {**GPT2, "n_inner": 60}},
    "gpt_neox": {
        "parallel": SIZES,
        "in turn": {
            **SIZES, "use_parallel_residual": False, "attention_bias": False,
            "hidden_act": "gelu_fast", "tie_word_embeddings": True,
        },
    },
    "smollm3": {
        "plain": {**GROUPED, "num_hidden_layers": 4},
        "windows": {
            **GROUPED, "use_sliding_window": True, "sliding_window": 40,
            "no_rope_layer_interval": 2, "attention_bias": True,
        },
    },
    "olmo2": {"plain": GROUPED, "bias": {**GROUPED, "attention_bias": True}},
    **dense_families.cases(SIZES, original=160),
    **delta_families.cases(SIZES),
    **gemma4_families.cases(SIZES),
    **recurrent_families.cases(SIZES),
    **latent_families.cases(SIZES, original=160),
    **expert_families.cases(SIZES, original=160),
}  # fmt: skip
CASES = [(family, case) for family, cases in CONFIGS.items() for case in cases]


OFFSET = {"gemma", "gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
"""Families whose norms multiply by 1 + weight."""


def make(family, case, gain=1.0, **changes):
    """A random model of transformers, and its folder.

    `gain` scales its layers, so that its greedy text varies: large embeddings would otherwise
    dominate.  `changes` are other fields of the configuration.
    """
    torch.manual_seed(0)
    config = transformers_folders.configured(family, **{**CONFIGS[family][case], **changes})
    auto = transformers_folders.auto(family)
    model = auto.from_config(config, attn_implementation="eager").eval()
    middle = 0.0 if family in OFFSET else 1.0
    buffers = [(name, leaf) for name, leaf in model.named_buffers() if "layer_scalar" in name]
    with torch.no_grad():
        for name, leaf in [*model.named_parameters(), *buffers]:
            if leaf.ndim == 1:
                leaf.normal_(0.0 if name.endswith("bias") else middle, 0.3)
                if family.startswith("gemma4") and "q_norm" in name:
                    leaf.mul_(0.3)  # scores are not divided by the size of a head
            elif ".layers." in name or ".h." in name:
                leaf.mul_(gain)
            elif family.startswith("gemma") and gain > 1:
                leaf.mul_(0.25)
        for name, leaf in model.named_buffers():
            if name.endswith("correction_bias"):
                leaf.normal_(0.0, 0.3)
    name = "-".join([family, case, *map(str, [gain, *changes.values()])]).replace(" ", "-")
    folder = transformers_folders.write(model, name, tokens=False)
    folders.edit(folder, model_type=family)
    return model, folder


def test_every_family_is_here():
    assert {*CONFIGS, "llama"} == set(specjax.FAMILIES)


@pytest.mark.parametrize(("family", "case"), CASES)
def test_parity(family, case):
    """Logits of 500 tokens differ by at most 1e-4; a saved copy equals the folder bit for bit."""
    model, folder = make(family, case)
    assert_parity(model, folder, vocab_size=96)
    loaded, copy = specjax.load(folder), folder.with_name(folder.name + "-copy")
    specjax.save(loaded, copy)
    again = specjax.load(copy)
    assert again.model == loaded.model
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    tokens = folders.random_tokens(20, vocab_size=96)
    auto = transformers_folders.auto(family)
    reloaded = auto.from_pretrained(copy, attn_implementation="eager").eval()
    # The bits of torch's own logits depend on where its arrays lie, those of the weights do not.
    before, after = model.state_dict(), reloaded.state_dict()
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    np.testing.assert_allclose(theirs(reloaded, tokens), theirs(model, tokens), rtol=0, atol=1e-5)


STEADY = {
    "deepseek_v3": {"first_k_dense_replace": 2},
    "mistral4": {"first_k_dense_replace": 2},
    "kimi_linear": {"mlp_layer_types": ["dense"] * 3},
    "lfm2_moe": {"num_experts_per_tok": 5},  # all of them
    "minimax_m2": {"num_experts_per_tok": 6},
    "phimoe": {"router_jitter_noise": 1.0},  # all logits are near, so that none enters or leaves
}
"""In so small a model of these families bfloat16 changes which experts are the best of a token, in
transformers too: their logits differ by 5 to 8 % then, and by 1 to 4 % with these changes."""


@pytest.mark.parametrize("family", CONFIGS)
def test_bfloat16(family):
    """In bfloat16 the mean difference of the logits of 100 tokens is below 5 % of their spread."""
    model, folder = make(family, next(iter(CONFIGS[family])), **STEADY.get(family, {}))
    tokens = folders.random_tokens(100, vocab_size=96)
    wanted, actual = (
        theirs(model, tokens),
        ours(specjax.load(folder, "bfloat16"), tokens).astype(np.float32),
    )
    assert np.sqrt(np.mean((actual - wanted) ** 2)) < 0.05 * wanted.std()


DECODED = ("mistral", "gpt2", "smollm3")
"""The families that are decoded by default: a window, learned positions, and layers without
positions. `test_tree` reads experts, windows in turn with caps, and learned positions of the other
kind with a cache; all else is in the logits alone, which `test_parity` compares."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in DECODED else pytest.mark.slow) for f in CONFIGS],
)
def test_text(family):
    """64 greedy tokens equal transformers.generate, plainly and with a draft that is right now
    and then."""
    model, folder = make(family, next(iter(CONFIGS[family])), gain=3.0)
    prompts = [folders.random_tokens(n, n, vocab_size=96)[0].tolist() for n in (9, 40)]
    texts = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=64, pad_token_id=0
        )
        texts.append(out[0, len(prompt) :].tolist())
    assert len({*texts[0], *texts[1]}) > 12, "texts too monotonous to prove anything"
    target = specjax.load(folder)
    assert specjax.generate(target, prompts, max_new_tokens=64).tokens == texts
    rng = np.random.default_rng(0)
    noisy = jax.tree.map(
        lambda x: jnp.asarray(x + 0.05 * x.std() * rng.normal(size=x.shape).astype(np.float32)),
        jax.device_get(target.params),
    )
    draft = dataclasses.replace(target, params=noisy)
    out = specjax.generate(target, prompts, draft=draft, num_drafts=3, max_new_tokens=64)
    assert out.tokens == texts
    assert 0.2 < out.stats.acceptance_rate < 1


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("gemma2", "caps"),
        ("smollm3", "windows"),
        ("mixtral", "two of four"),
        ("opt", "norms before"),
        ("ministral3", "growth"),
        ("cohere2", "tied"),
        ("stablelm", "parallel, norms of heads"),
        ("mistral4", "growing queries"),
    ],
)
def test_tree(family, case):
    """A tree node has the logits of its path read plainly, with windows and learned positions."""
    target = specjax.load(make(family, case)[1])
    text, nodes = (
        folders.random_tokens(60, vocab_size=96),
        folders.random_tokens(6, 1, vocab_size=96),
    )
    parent = jnp.array([-1, 0, 0, 1, 3, 2])

    @jax.jit
    def read(params, tokens, positions, cache=None, mask=None):
        return target.model.apply(params, tokens, positions, cache, mask)

    cache = target.model.init_cache(1, 80)
    cache = read(target.params, text, jnp.arange(60)[None], cache).cache.commit(jnp.array([60]))
    depth = tree.depth(parent)
    out = read(target.params, nodes, 60 + depth[None], cache, tree.ancestor_mask(parent)[None])
    for node in range(6):
        path = np.asarray(tree.path(parent, jnp.int32(node), 5))[: int(depth[node]) + 1]
        whole = np.concatenate([text, nodes[:, path]], axis=1)
        end = whole.shape[1]
        padded = np.pad(whole, ((0, 0), (0, 66 - end)))  # one shape, so one program
        wanted = read(target.params, padded, jnp.arange(66)[None]).logits[0, end - 1]
        np.testing.assert_allclose(out.logits[0, node], wanted, atol=2e-5)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "qwen2",
            {"rope_scaling": {"type": "proportional", "factor": 2.0}, "rope_parameters": None},
            '"proportional"',
        ),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("opt", {"enable_bias": False}, "enable_bias=False"),
        ("mixtral", {"num_experts_per_tok": 9}, "experts_per_token=9"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("gpt_neox", {"hidden_act": "quick_gelu"}, '"quick_gelu"'),
        ("gpt_neox", {"layer_norm_eps": -1e-5}, "layer_norm_eps is -1e-05"),
        ("gpt_neox", {"rope_parameters": None, "rotary_pct": 0}, "rotary_pct is 0"),
        ("gpt_neox", {"rope_parameters": None, "rotary_emb_base": 0}, "rotary_emb_base is 0"),
        ("gpt_neox", {"use_parallel_residual": "false"}, 'use_parallel_residual is "false"'),
        ("gpt_neox", {"attention_bias": None}, "attention_bias is null"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, 'topk_method is "noaux_tc"'),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ("deepseek_v3", {"mlp_bias": True}, "mlp_bias=True"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("deepseek_v3", {"n_group": 3}, "8 experts cannot be cut into 3 groups"),
        (
            "kimi_k2",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
            "mscale_all_dim=1.0",
        ),
        (
            "glm4_moe_lite",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "other"]}, '"other"'),
        ("llama4_text", {"attention_chunk_size": 0}, "attention_chunk_size is 0"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
        ("llama4_text", {"attn_temperature_tuning": "yes"}, 'attn_temperature_tuning is "yes"'),
        ("llama4_text", {"floor_scale": -1}, "floor_scale is -1"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=False"),
        ("kimi_linear", {"use_grouped_topk": False}, "use_grouped_topk=False"),
        (
            "kimi_linear",
            {
                "layer_types": None,
                "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [3]},
            },
            r"names layers \[2\] neither",
        ),
        ("mistral4", {"q_lora_rank": -1}, "q_lora_rank is -1"),
        ("gpt2", {"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon is NaN"),
        ("gpt2", {"tie_word_embeddings": "false"}, 'tie_word_embeddings is "false"'),
        ("opt", {"do_layer_norm_before": "false"}, 'do_layer_norm_before is "false"'),
        ("opt", {"_remove_final_layer_norm": 1}, "_remove_final_layer_norm is 1"),
        ("opt", {"init_std": -1}, "init_std is -1"),
        ("qwen2", {"use_sliding_window": "false"}, 'use_sliding_window is "false"'),
        ("qwen3_moe", {"norm_topk_prob": "false"}, 'norm_topk_prob is "false"'),
        ("qwen3_moe", {"use_sliding_window": "false"}, 'use_sliding_window is "false"'),
        ("smollm3", {"use_sliding_window": "false"}, 'use_sliding_window is "false"'),
        ("smollm3", {"tie_word_embeddings": "false"}, 'tie_word_embeddings is "false"'),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0"),
        ("gemma2", {"final_logit_softcapping": float("nan")}, "final_logit_softcapping is NaN"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma2", {"tie_word_embeddings": "false"}, 'tie_word_embeddings is "false"'),
        ("gemma3_text", {"final_logit_softcapping": -1}, "final_logit_softcapping is -1"),
        (
            "gemma3_text",
            {"rope_parameters": None, "rope_local_base_freq": 0},
            "rope_local_base_freq is 0",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_theta": 0}}},
            "rope_theta is 0",
        ),
    ],
)
def test_refused_switch(family, change, message):
    """A switch that is not implemented is refused by name."""
    folder = make(family, next(iter(CONFIGS[family])))[1]
    before = json.loads((folder / "config.json").read_text())
    folders.edit(folder, **change)
    with pytest.raises(ValueError, match=message):
        specjax.load(folder)
    (folder / "config.json").write_text(json.dumps(before))


@pytest.mark.parametrize("family", CONFIGS)
def test_what_holds_where_a_file_is_silent(family, tmp_path):
    """Each field but the sizes is left out in turn; the default must be that of transformers."""
    sizes = {"max_position_embeddings", "num_key_value_heads", "n_group"}
    sizes |= {"qk_nope_head_dim", "qk_rope_head_dim", "num_experts_per_tok", "num_local_experts"}
    sizes |= {"mamba_n_heads", "mamba_d_head", "mamba_d_ssm", "mamba_expand", "n_groups"}
    sizes |= {"linear_num_key_heads", "linear_num_value_heads"}
    config = transformers_folders.configured(family, **next(iter(CONFIGS[family].values())))
    config.save_pretrained(tmp_path)
    whole, compared = json.loads((tmp_path / "config.json").read_text()), 0
    for key in set(whole) - sizes - {"model_type", "architectures"}:
        given = {name: value for name, value in whole.items() if name != key}
        try:
            config_read = specjax.FAMILIES[family].read_config(given)
        except KeyError:  # the field is required
            continue
        (tmp_path / "config.json").write_text(json.dumps(given))
        full = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
        assert config_read == specjax.FAMILIES[family].read_config(full), key
        compared += 1
    assert compared > 8


def table() -> str:
    """Largest difference of the logits over 500 tokens, by case.

    `python tests/product/test_families.py` prints it.
    """
    lines = ["| family | case | largest difference | spread of the logits |", "|---|---|---|---|"]
    for family, case in CASES:
        model, folder = make(family, case)
        tokens = folders.random_tokens(500, vocab_size=96)
        wanted = theirs(model, tokens)
        largest = np.abs(ours(specjax.load(folder), tokens) - wanted).max()
        lines.append(f"| {family} | {case} | {largest:.1e} | {wanted.std():.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
