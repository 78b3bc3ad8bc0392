# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Bring your own model
#
# Any causal function from tokens to logits can be the target or the draft. It may be written in Linen, NNX, Equinox or plain
# JAX.
#
# **Runtime:** any. In Colab, first enter the URL of the repository that this notebook came from.

# %%
REPOSITORY = ""  # @param {type:"string"}
RELEASE = "v0.1.0"

import sys

if "google.colab" in sys.modules:  # leaves Colab's jax alone
    if not REPOSITORY:
        raise ValueError("enter in REPOSITORY the git URL of the repository of this notebook")
    # !pip install -q "specjax[hub] @ git+{REPOSITORY}@{RELEASE}"

# %%
import jax
import jax.numpy as jnp
from flax import linen as nn

import specjax

# %% [markdown]
# ## A Linen module


# %%
class Mine(nn.Module):  # tokens [B, T] -> logits [B, T, V]
    features: int

    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(100)(
            nn.RNN(nn.GRUCell(self.features))(nn.Embed(100, self.features)(tokens))
        )


def make(features, seed):
    module = Mine(features)
    params = module.init(jax.random.key(seed), jnp.zeros((1, 1), int))
    return specjax.LanguageModel(
        specjax.models.from_linen(module, vocab_size=100, max_positions=512), params
    )


target, draft = make(64, 0), make(16, 1)
prompts = [[1, 2, 3], [4]]
plain = specjax.generate(target, prompts, proposer="none", max_new_tokens=32, temperature=1.0)
fast = specjax.generate(target, prompts, draft=draft, max_new_tokens=32, temperature=1.0)
print("the same tokens:", plain.tokens == fast.tokens)

# %% [markdown]
# Both models have random weights, so they agree only by chance and this draft saves little. The text is still the target's.
# A model like this one has no KV cache and reads the whole text again in every pass. A model with a KV cache is as fast as
# specjax's own models:

# %%
from specjax.caches import KVCache, stage, visible_slots
from specjax.models import attend


def apply(params, tokens, positions, cache, mask):  # one layer of attention with one head of 32
    x = params["embed"][tokens] + params["places"][positions]
    query, *new = (
        y[:, :, None] for y in jnp.split(x @ params["qkv"], 3, axis=-1)
    )  # [B, N, 1, 32] each
    keys, values = (
        stage(old, y.swapaxes(1, 2), cache.length)
        for old, y in zip(cache.keys + cache.values, new, strict=True)
    )
    x = x + attend(
        query, keys, values, visible_slots(cache.length, tokens.shape[1], cache.capacity, mask)
    )
    return x @ params["embed"].T, KVCache((keys,), (values,), cache.length)


def empty(rows, slots):
    return KVCache.zeros(1, rows, 1, slots, 32, jnp.float32)


shapes = {"embed": (100, 32), "places": (512, 32), "qkv": (32, 96)}
params = {
    name: jax.random.normal(jax.random.key(i), shape)
    for i, (name, shape) in enumerate(shapes.items())
}
model = specjax.models.from_function(apply, vocab_size=100, max_positions=512, init_cache=empty)

# %% [markdown]
# `check_model` checks the contract: the model must be causal, and it must give the same logits whether it reads the tokens in
# one pass, in pieces or as a tree.

# %%
specjax.models.check_model(model, params)
mine = specjax.LanguageModel(model, params)
plain = specjax.generate(mine, prompts, proposer="none", max_new_tokens=32)
fast = specjax.generate(mine, prompts, proposer=specjax.NGram(), max_new_tokens=32)
print(
    "the same tokens:", plain.tokens == fast.tokens, f"  tau {fast.stats.mean_accepted_length:.2f}"
)
