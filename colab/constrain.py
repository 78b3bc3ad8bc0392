# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Texts that fit a schema
#
# A text can be constrained to a regular expression, to JSON of a schema, or to one of a few choices. The constraint is a table
# on the device, which the decoder reads at every node of a tree of drafts. Every token is drawn from those that can still lead
# to a text that fits, so the text always fits, and speculation still changes no token.
#
# **Runtime:** any. In Colab, first enter the URL of the repository that this notebook came from.

# %%
REPOSITORY = ""  # @param {type:"string"}
RELEASE = "v0.1.0"

import sys

if "google.colab" in sys.modules:  # leaves Colab's jax alone
    if not REPOSITORY:
        raise ValueError("enter in REPOSITORY the git URL of the repository of this notebook")
    # !pip install -q "specjax[hub,constrain] @ git+{REPOSITORY}@{RELEASE}"

# %%
import json

import specjax

target = specjax.load(specjax.shipped("pycode/target"))

# %% [markdown]
# ## JSON of a schema
# Much of such a text is forced: after `{` only one key is possible. The proposer `forced` drafts these tokens, which costs no
# model. With `canonical=True` they are written only as the tokenizer spells them, so there are more of them. What stands in the
# fields is up to the model: the shipped one writes Python and is small, so its values fit the schema and mean little.

# %%
fields = specjax.JSONSchema(
    {
        "type": "object",
        "properties": {
            "level": {"enum": ["DEBUG", "INFO", "WARNING", "ERROR"]},
            "line": {"type": ["integer", "null"]},
        },
        "required": ["level", "line"],
    },
    whitespace="",
    canonical=True,
)
prompt = "ERROR parser.tokens:118 unexpected indent\n# The same line as JSON:\n"
options = {"constraint": fields, "max_new_tokens": 32, "temperature": 1.0, "seed": 3}
plain = specjax.generate(target, prompt, **options, proposer="none")
fast = specjax.generate(target, prompt, **options, proposer="forced")
print(json.loads(fast.text[0]))
print("the same tokens:", plain.tokens == fast.tokens)
print(f"passes: {plain.stats.target_passes} without drafts, {fast.stats.target_passes} with them")

# %% [markdown]
# ## Another constraint for each prompt
# Each row has its own. A row without one is not changed by those of the others.

# %%
prompts = ["released = ", "answer = ", "import "]
mixed = specjax.generate(
    target,
    prompts,
    constraint=[specjax.Regex("20[0-9]{2}-[01][0-9]"), specjax.Choice(["yes", "no"]), None],
    proposer="forced",
    max_new_tokens=12,
    temperature=1.0,
)
for prompt, text in zip(prompts, mixed.text, strict=True):
    print(repr(prompt + text))

# %% [markdown]
# An error names what cannot work before anything is compiled:

# %%
try:
    specjax.generate(target, "x = ", constraint="[0-9]+")
except ValueError as error:
    print(error)
