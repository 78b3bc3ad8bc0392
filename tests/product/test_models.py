"""The transformer against transformers: the same folder gives the same logits and the same text."""

import json

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
import transformers_folders

import specjax

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

# One folder per line: the configuration for transformers.
CONFIGS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "one_kv_head": {"num_key_value_heads": 1},
    "all_kv_heads": {"num_key_value_heads": 4},
    "wide_heads": {"head_dim": 32},
    "narrow_heads": {"head_dim": 6},
    "llama3_rope": {"rope_parameters": LLAMA3},
    "linear_rope": {"rope_parameters": LINEAR},
    "rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "norm_eps": {"rms_norm_eps": 0.1},
}


def theirs(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.float().numpy()


def ours(loaded, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    apply = jax.jit(
        lambda params: loaded.model.apply(params, jnp.asarray(tokens), positions).logits
    )
    return np.asarray(apply(loaded.params))


def assert_parity(model, folder, vocab_size=320):
    tokens = folders.random_tokens(500, vocab_size=vocab_size)
    wanted = theirs(model, tokens)
    assert wanted.std() > 0.3, "logits too flat to tell models apart"
    np.testing.assert_allclose(ours(specjax.load(folder), tokens), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name):
    """Logits of 500 tokens differ from transformers' by at most 1e-4."""
    model = transformers_folders.random_llama(4, **CONFIGS[name])
    assert_parity(model, transformers_folders.write(model, f"parity-{name}"))


@pytest.mark.parametrize(
    ("name", "scaling"), [("llama3", LLAMA3), ("linear", LINEAR), ("default", None)]
)
def test_old_spelling_of_rope(name, scaling):
    """`rope_theta` with `rope_scaling` (`type` before transformers 4.45) means the same as
    `rope_parameters`."""
    parameters = scaling or {"rope_type": "default", "rope_theta": 700.0}
    model = transformers_folders.random_llama(4, rope_parameters=parameters)
    folder = transformers_folders.write(model, f"old-{name}")
    if scaling:
        kept = {k: v for k, v in scaling.items() if k not in ("rope_theta", "rope_type")}
        scaling = {"type": name, **kept}
    theta = parameters["rope_theta"]
    folders.edit(
        folder, drop=("rope_parameters", "head_dim"), rope_theta=theta, rope_scaling=scaling
    )
    assert_parity(model, folder)


def test_shards():
    """A sharded folder has the same parameters as a single file."""
    model = transformers_folders.random_llama(4)
    folder = transformers_folders.write(model, "shards", max_shard_size="60KB")
    files = set(
        json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()
    )
    assert len(files) > 2 and not (folder / "model.safetensors").exists()
    assert_parity(model, folder)


def test_bfloat16_file():
    """A bfloat16 file read as float32 has the rounded weights and gives their logits."""
    model = transformers_folders.random_llama(4)
    exact = model.lm_head.weight.detach().numpy().copy()
    model = model.bfloat16()
    folder = transformers_folders.write(model, "bfloat16")
    stored = safetensors.torch.load_file(folder / "model.safetensors")["lm_head.weight"]
    assert stored.dtype == torch.bfloat16
    kernel = np.asarray(specjax.load(folder).params["head"]["kernel"]).T
    assert kernel.dtype == np.float32
    np.testing.assert_array_equal(kernel, exact.astype(jnp.bfloat16).astype(np.float32))
    # model.float() would not do, since .bfloat16() has rounded its rotary frequencies too.
    assert_parity(
        transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), folder
    )


@pytest.mark.parametrize("differs", [False, True])
def test_a_tied_flag_beside_an_output_matrix(differs, tmp_path):
    """A copy of the embedding is the embedding.  Another matrix is an output matrix of its own, as
    in transformers, and a saved copy of the model says that the two are not tied."""
    model = transformers_folders.random_llama(4, tie_word_embeddings=True)
    folder = transformers_folders.write(model, f"tied-beside-{differs}")
    folders.change_tensors(
        folder,
        lambda tensors: tensors.update(
            {"lm_head.weight": np.roll(tensors["model.embed_tokens.weight"], int(differs), 0)}
        ),
    )
    if not differs:
        assert_parity(model, folder)
        return
    read = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    assert not torch.equal(read.lm_head.weight, read.model.embed_tokens.weight)
    with pytest.warns(UserWarning, match=r"another lm_head\.weight"):
        loaded = specjax.load(folder)
    specjax.save(loaded, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == {
        **json.loads((folder / "config.json").read_text()), "tie_word_embeddings": False
    }  # fmt: skip
    assert_parity(read, tmp_path / "saved")


@pytest.fixture(scope="module")
def greedy():
    """Prompts, and the 64 tokens that transformers.generate writes for each."""
    model = transformers.LlamaForCausalLM.from_pretrained(folders.target()).eval()
    prompts = [folders.random_tokens(11, seed).tolist()[0] for seed in range(3)]
    texts = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=64, pad_token_id=0
        )
        texts.append(out[0, len(prompt) :].tolist())
    assert all(len(set(text)) > 20 for text in texts), "texts too monotonous to prove anything"
    return prompts, texts


@pytest.mark.parametrize("how", ["plain", "ngram", "draft"])
def test_greedy_text(greedy, how):
    """Greedy text equals that of transformers.generate token for token, with and without
    speculation."""
    prompts, texts = greedy
    options = {
        "plain": dict,
        "ngram": lambda: {"proposer": specjax.NGram()},
        "draft": lambda: {"draft": specjax.load(folders.draft())},
    }[how]()
    out = specjax.generate(specjax.load(folders.target()), prompts, max_new_tokens=64, **options)
    assert out.tokens == texts
