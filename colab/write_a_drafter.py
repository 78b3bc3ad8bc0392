# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Write a proposer and a rule of your own
#
# A proposer drafts, and a rule decides which drafts are accepted. Both are small classes of pure functions. Whatever a proposer
# drafts, the text stays the target's own; a rule has to be exact for that, and the auditor checks whether it is.
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
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

import specjax
from specjax.contract import Proposer, Rule
from specjax.types import Proposal, Verdict

target = specjax.load(specjax.shipped("tiny/target"))  # small, so that all of this takes a minute

# %% [markdown]
# ## A proposer
# It drafts for each token the one that most often came after it, from a table [V]. `propose` gets the pending token of each
# row, [B], and returns a tree [B, N], here a chain. The table is a parameter, so another table compiles nothing.


# %%
@dataclasses.dataclass(frozen=True)
class Bigram(Proposer):
    depth: int = 3
    is_chain = True
    point_mass = True  # nothing is sampled: every draft is a function of the text

    def __post_init__(self):
        self.declare(num_nodes=self.depth + 1, max_depth=self.depth)

    def propose(self, params, state, context):
        tokens = [context.pending]
        for _ in range(self.depth):
            tokens.append(params[tokens[-1]])
        tokens = jnp.stack(tokens, axis=1)
        parent = jnp.broadcast_to(specjax.tree.chain(self.num_nodes), tokens.shape)
        return Proposal(tokens, parent, point_mass=True), state


# %% [markdown]
# The law of every proposer is that the text is that of plain decoding, at any temperature:

# %%
code = pathlib.Path(specjax.__file__).read_text()
ids = np.array(target.tokenizer.encode(code).ids)
counts = np.zeros((target.model.vocab_size,) * 2, np.int32)
np.add.at(counts, (ids[:-1], ids[1:]), 1)
bigrams = specjax.Drafter(Bigram(), jnp.asarray(counts.argmax(1), jnp.int32), "bigrams")

options = {"max_new_tokens": 32, "temperature": 1.0, "seed": 5}
prompts = ["import ", "def f("]
plain = specjax.generate(target, prompts, **options, proposer="none")
fast = specjax.generate(target, prompts, **options, drafter=bigrams)
print(f"the same tokens: {plain.tokens == fast.tokens}   {fast.stats}")

# %% [markdown]
# ## A rule
# This one accepts a draft that is among the target's `top` best tokens. So it accepts more, and the text is no longer
# distributed as the target's own: `exact = False` says so, and every output repeats it. `top` is data of the rule.


# %%
@struct.dataclass
class TopTokens(Rule):
    top: float = 2.0
    exact = False
    shared_noise = True  # the next token is the target's own draw

    def __call__(self, draw, proposal, tree, logits):  # ONE row: tokens [N], logits [N, V]
        parent = jnp.maximum(tree.parent, 0)
        drafted = logits[parent, proposal.tokens]
        good = (tree.parent >= 0) & ((logits[parent] > drafted[:, None]).sum(-1) < self.top)

        def visit(node, child):
            return jnp.where((tree.parent[child] == node) & good[child], child, node), None

        children = jnp.arange(1, len(proposal.tokens), dtype=jnp.int32)
        node, _ = jax.lax.scan(visit, jnp.int32(0), children)
        noise = draw.noise(node[None], tree.depth[node][None])[0]
        return Verdict(node, specjax.sampling.argmax(logits[node] + noise))


for top in (1.0, 20.0):
    output = specjax.generate(target, prompts, **options, drafter=bigrams, rule=TopTokens(top))
    print(f"top {top:<4} exact: {output.exact}   tau {output.stats.mean_accepted_length:.2f}")

# %% [markdown]
# ## Ask the auditor
# `specjax.audit` compares a decoder with a reference that reads whole texts anew, and checks each property that it claims. The
# rule above is honest about itself. This one claims to be exact, and is caught. With `specjax.Match()` in its place the
# decoder passes.


# %%
class Liar(TopTokens):
    exact = True


decoder = specjax.Decoder(target.model, Bigram(), Liar(20.0), target.eos, capacity=32)
params = specjax.Params(target.params, bigrams.params)
short = [target.tokenizer.encode(prompt).ids for prompt in prompts]
report = specjax.audit(decoder, params, short, samples=1024, max_new_tokens=8, rows=32)
print(report)
print("the lie was found:", not report.passed)
