# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # EAGLE-3: a published head grows a tree
#
# An EAGLE-3 head is one decoder layer that reads hidden states of the target, from three of its layers, and drafts the next
# tokens. Many are published. specjax reads the layouts of EAGLE, SpecForge, speculators, ModelOpt and DeepSpec, and arranges
# the drafts of any head in a chain or a tree.
#
# **Runtime:** any. In Colab, first enter the URL of the repository that this notebook came from.

# %%
REPOSITORY = ""  # @param {type:"string"}
RELEASE = "v0.1.0"

import sys

if "google.colab" in sys.modules:  # leaves Colab's jax alone
    if not REPOSITORY:
        raise ValueError("enter in REPOSITORY the git URL of the repository of this notebook")
    # !pip install -q "specjax[hub,plot] @ git+{REPOSITORY}@{RELEASE}"

# %%
import jax
import numpy as np

import specjax
from specjax import plot

# %% [markdown]
# ## Load a head
# With the name of a target on the Hub, and of a head that was trained for it, this cell loads that pair in bfloat16. Without
# them it loads the small pair that comes with specjax. A head that does not fit its target is refused with a message that
# names what differs. `specjax inspect FOLDER` shows what a head holds.

# %%
TARGET = ""  # @param {type:"string"}
HEAD = ""  # @param {type:"string"}

if TARGET and HEAD:
    target, folder = specjax.load(TARGET, dtype="bfloat16"), HEAD
else:
    target, folder = (
        specjax.load(specjax.shipped("pycode/target")),
        specjax.shipped("pycode/eagle3"),
    )
chain = specjax.load_drafter(folder, target, specjax.Chain, num_drafts=5)
tree = specjax.load_drafter(folder, target, specjax.DynamicTree, depth=5, width=3, num_nodes=16)
print(f"the head reads layers {tree.proposer.taps} of {target.name}")

# %% [markdown]
# ## The same text, in fewer passes
# A tree has several candidates for a position, so more of it is accepted than of a chain. It costs more, too.

# %%
prompt = "def read_lines(path):"
options = {"max_new_tokens": 48, "temperature": 0.0}
plain = specjax.generate(target, prompt, **options, proposer="none")
print(prompt + plain.text[0])
for name, drafter in (("chain", chain), ("tree", tree)):
    output = specjax.generate(target, prompt, **options, drafter=drafter)
    print(
        f"{name:<6} the same tokens: {output.tokens == plain.tokens}"
        f"   {output.stats.target_passes} passes, tau {output.stats.mean_accepted_length:.2f}"
    )

# %% [markdown]
# ## Look at the trees of three steps
# `Decoder` has the parts of a step as functions: `propose`, `verify`, `commit`. The marked path was accepted. A
# `DynamicTree` grows along the most probable tokens, so each step has another tree.

# %%
decoder = specjax.Decoder(target.model, tree.proposer, specjax.Match(), target.eos, capacity=96)
params = specjax.Params(target.params, tree.arrays(target))
ids = np.array([target.tokenizer.encode(prompt).ids])
state = decoder.prefill(
    params,
    ids,
    np.array([ids.shape[1]]),
    limit=np.array([80]),
    sampling=specjax.Sampling.create(1, temperature=0.0),
    key=jax.random.split(specjax.make_key(0), 1),
)


@jax.jit
def step(params, state):
    proposal, state = decoder.propose(params, state)
    verified = decoder.verify(params, state, proposal)
    state, _ = decoder.commit(params, state, proposal, verified)
    return state, proposal, verified.verdict.node


# %%
# %matplotlib inline
figures = []
for _ in range(3):
    state, proposal, node = step(params, state)
    parent, path = np.asarray(proposal.parent[0]), [int(node[0])]
    while path[-1] > 0:
        path.append(int(parent[path[-1]]))
    words = [repr(target.tokenizer.decode([token])) for token in proposal.tokens[0].tolist()]
    figures.append(plot.tree(parent, labels=words, path=path))
figures[0]

# %%
figures[1]

# %%
figures[2]
