# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # A server whose texts do not depend on load
#
# In most servers a greedy text changes with what else is in the batch, because a pass of another shape rounds differently.
# Here the shape of a pass never changes: the text of a request depends on its prompt, its settings and its seed alone. Each
# request chooses its drafter.
#
# **Runtime:** any. In Colab, first enter the URL of the repository that this notebook came from.

# %%
REPOSITORY = ""  # @param {type:"string"}
RELEASE = "v0.1.0"

import sys

if "google.colab" in sys.modules:  # leaves Colab's jax alone
    if not REPOSITORY:
        raise ValueError("enter in REPOSITORY the git URL of the repository of this notebook")
    # !pip install -q "specjax[hub,serve] @ git+{REPOSITORY}@{RELEASE}"

# %%
import specjax
from specjax.drafters import drafter_by_name
from specjax.serve import Engine

target = specjax.load(specjax.shipped("pycode/target"))
draft = specjax.load(specjax.shipped("pycode/draft"))

# %% [markdown]
# ## The engine
# All programs are compiled when the engine starts. `submit` returns at once, and requests that come and go share one batch of
# `slots` rows.

# %%
drafters = {
    "draft": specjax.make_drafter(target, draft, num_drafts=3),
    "lookup": drafter_by_name("ngram", target),
}
engine = Engine(target, drafters, slots=2, capacity=128, chunk=32)
asked = specjax.Request(prompts="def main(", max_new_tokens=24, temperature=0.5, seed=1)
alone = engine.submit(asked).result()
print(alone.text)

# %% [markdown]
# Now the same request, beside others that come before and after it, with other drafters and lengths:

# %%
others = [
    specjax.Request(prompts=prompt, max_new_tokens=length, temperature=0.5, proposer=name)
    for prompt, length, name in (
        ("import os\n", 10, "lookup"),
        ("class Stack:", 30, "none"),
        ("for i in", 16, "draft"),
    )
]
handles = [engine.submit(request) for request in (others[0], asked, *others[1:])]
texts = [handle.result() for handle in handles]
print("the same text alone and beside others:", texts[1].text == alone.text)

# %% [markdown]
# ## Over HTTP
# In a terminal `specjax serve --target FOLDER --draft FOLDER` starts such an engine with OpenAI's and LoRAX's API. In this
# process a thread serves it. With the `openai` package a client is `OpenAI(base_url=f"{address}/v1", api_key="none")`.

# %%
import json
import socket
import threading
import urllib.request

from specjax.serve.http import Limits, Server

listening = socket.create_server(("127.0.0.1", 0))
server = Server(engine, Limits(), *listening.getsockname())
thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
thread.start()
address = "http://{}:{}".format(*listening.getsockname())


def post(path, **body):
    asked = urllib.request.Request(address + path, json.dumps(body).encode())
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)


body = {"prompt": "def main(", "max_tokens": 24, "temperature": 0.5, "seed": 1}
drafted = post("/v1/completions", **body)
undrafted = post("/v1/completions", **body, speculation={"drafter": "none"})
print(json.dumps(drafted["choices"][0], indent=1))
print(
    "the same text with and without drafts:",
    drafted["choices"][0]["text"] == undrafted["choices"][0]["text"] == alone.text,
)

# %% [markdown]
# The address also has a page at `/` that colours each token by who drafted it, and `/metrics` for Prometheus. At the end the
# server stops, and then the engine:

# %%
server.should_exit = True
thread.join()
listening.close()
engine.close()
