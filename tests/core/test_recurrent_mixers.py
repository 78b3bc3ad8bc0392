"""Short convolutions, Mamba2 and Kimi delta attention compute their recurrences along branches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from specjax.models import TransformerConfig
from specjax.models.layers import Dense
from specjax.models.mixers.kimi_delta import KimiDelta
from specjax.models.mixers.mamba2 import Mamba2, Scales
from specjax.models.mixers.short_conv import ShortConv

WIDE, ROWS, BEFORE, NODES = 8, 2, 5, 9
CONFIG = TransformerConfig(
    vocab_size=9, hidden_size=WIDE, mlp_size=9, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=4, max_positions=64, init_scale=0.5,
)  # fmt: skip
MAMBA = Mamba2(heads=4, head_dim=3, state_dim=5, groups=2)
CASES = {
    "short convolution": ShortConv(WIDE),
    "short convolution, biases": ShortConv(WIDE, conv_size=5, bias=True),
    "Mamba2": MAMBA,
    "Mamba2, biases": dataclasses.replace(MAMBA, bias=True, out_bias=True, conv_bias=False),
    "Mamba2, no norm, muP": dataclasses.replace(
        MAMBA, norm=None, scales=Scales(0.7, 1.2, 0.8, 1.4, 0.6, 1.1, 1.3)
    ),
    "Mamba2, norm before the gate": dataclasses.replace(MAMBA, groups=1, norm="before_gate"),
    "Kimi delta attention": KimiDelta(heads=2, head_dim=3),
}


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.logaddexp(0, x)


def project(params, name, x):
    return x @ params[name]["kernel"] + params[name].get("bias", 0)


def convolved(params, names, new, columns):
    """What the convolutions make of one token, and their inputs afterwards."""
    made, kept = [], []
    for name, x, old in zip(names, new, columns, strict=True):
        every = np.concatenate([old, x[None]])
        made.append((params[f"conv_{name}"] * every).sum(0) + params.get(f"conv_{name}_bias", 0))
        kept.append(every[1:])
    return made, kept


def short_conv(m, params, x, columns, state):
    (mixed,), columns = convolved(
        params, "x", [project(params, "b", x) * project(params, "x", x)], columns
    )
    return project(params, "o", project(params, "c", x) * mixed), columns, state


def mamba2(m, params, x, columns, state):
    s = m.scales
    x = x * s.input
    made = {
        name: project(params, name, x) * getattr(s, name) for name in ("z", "x", "b", "c", "dt")
    }
    parts, columns = convolved(params, "xbc", [made[name] for name in "xbc"], columns)
    value, key, query = map(silu, parts)
    value = value.reshape(m.heads, m.head_dim)
    key, query = (y.reshape(m.groups, m.state_dim) for y in (key, query))
    step = softplus(made["dt"] + params["dt_bias"])
    out, after = np.empty_like(value), np.empty_like(state)
    for head in range(m.heads):
        group = head * m.groups // m.heads
        decay = np.exp(-np.exp(params["A_log"][head]) * step[head])
        after[head] = decay * state[head] + step[head] * np.outer(key[group], value[head])
        out[head] = query[group] @ after[head] + params["D"][head] * value[head]
    out, gate = out.reshape(-1), silu(made["z"])

    def normed(y):
        groups = y.reshape(m.groups, -1)
        groups = groups / np.sqrt((groups**2).mean(1, keepdims=True) + CONFIG.norm_eps)
        return params["norm"] * groups.reshape(-1)

    out = {
        None: lambda: out * gate,
        "after_gate": lambda: normed(out * gate),
        "before_gate": lambda: normed(out) * gate,
    }[m.norm]()
    return project(params, "o", out) * s.output, columns, after


def kimi_delta(m, params, x, columns, state):
    parts, columns = convolved(params, "qkv", [project(params, name, x) for name in "qkv"], columns)
    query, key, value = (silu(y).reshape(m.heads, m.head_dim) for y in parts)
    query, key = (y / np.sqrt((y**2).sum(1, keepdims=True) + 1e-6) for y in (query, key))
    beta = sigmoid(project(params, "b", x))
    step = project(params, "f_b", project(params, "f_a", x)) + params["dt_bias"]
    step = softplus(step).reshape(m.heads, m.head_dim)
    out, after = np.empty_like(value), np.empty_like(state)
    for head in range(m.heads):
        decayed = np.exp(-np.exp(params["A_log"][head]) * step[head])[:, None] * state[head]
        update = beta[head] * (value[head] - decayed.T @ key[head])
        after[head] = decayed + np.outer(key[head], update)
        out[head] = m.head_dim**-0.5 * query[head] @ after[head]
    out = out / np.sqrt((out**2).mean(1, keepdims=True) + CONFIG.norm_eps) * params["norm"]
    gate = sigmoid(project(params, "g_b", project(params, "g_a", x)))
    return project(params, "o", out.reshape(-1) * gate), columns, after


STEPS = {ShortConv: short_conv, Mamba2: mamba2, KimiDelta: kimi_delta}
"""The record of a mixer -> its recurrence: the output of one token, its columns and its state."""


def layer(mixer):
    def dense(*given, name):
        return Dense(*given, name=name)

    return mixer.module()(CONFIG, mixer, dense)


def random_params(mixer, rng):
    """No parameter is neutral."""
    module, x = layer(mixer), jnp.zeros((1, 2, WIDE))
    made = jax.eval_shape(lambda: module.init(jax.random.key(0), x, None, None, None))
    return jax.tree.map(lambda leaf: rng.normal(0.2, 0.5, leaf.shape), meta.unbox(made)["params"])


def along(mixer, params, text, memory):
    """The recurrence over [N, E]: its outputs, and what it keeps at the end."""
    columns, state = memory
    outputs = []
    for x in text:
        y, columns, state = STEPS[type(mixer)](mixer, params, x, columns, state)
        outputs.append(y)
    return outputs, (columns, state)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_tree_is_the_recurrence_along_each_branch(case, seed):
    """After a text: the output of each node, and what is kept after a path is committed."""
    mixer, rng = CASES[case], np.random.default_rng(seed)
    params = random_params(mixer, rng)
    texts = rng.standard_normal((ROWS, BEFORE, WIDE))
    nodes = rng.standard_normal((ROWS, NODES, WIDE))
    parents = [[int(rng.integers(-1, node)) for node in range(NODES)] for _ in range(ROWS)]
    seen = np.zeros((ROWS, NODES, NODES), bool)
    for row in range(ROWS):
        for node, parent in enumerate(parents[row]):
            seen[row, node] = seen[row, parent] if parent >= 0 else False
            seen[row, node, node] = True
    ends = rng.integers(0, NODES, ROWS)
    paths = np.zeros((ROWS, NODES), int)
    for row in range(ROWS):
        path = np.flatnonzero(seen[row, ends[row]])
        paths[row, : len(path)] = path

    @jax.jit
    def run(params):
        params = {"params": jax.tree.map(lambda y: jnp.asarray(y, jnp.float32), params)}
        memory = mixer.state(ROWS, jnp.float32)
        apply: Any = layer(mixer).apply
        first, memory = apply(params, jnp.asarray(texts, jnp.float32), None, memory, None)
        memory = memory.commit(jnp.array([BEFORE, BEFORE - 2]))
        second, memory = apply(
            params, jnp.asarray(nodes, jnp.float32), None, memory, jnp.asarray(seen)
        )
        count = jnp.asarray([seen[row, ends[row]].sum() for row in range(ROWS)])
        return first, second, memory.commit(count, jnp.asarray(paths))

    first, second, memory = run(params)
    start = mixer.state(1, jnp.float32)
    for row in range(ROWS):
        kept = BEFORE - 2 * row
        empty = (
            [np.zeros(y.shape[1:]) for y in start.columns],
            None if start.state is None else np.zeros(start.state.shape[1:]),
        )
        wanted, _ = along(mixer, params, texts[row], empty)
        np.testing.assert_allclose(first[row], wanted, atol=2e-5)
        _, before = along(mixer, params, texts[row, :kept], empty)
        for node in range(NODES):
            wanted, after = along(mixer, params, nodes[row, seen[row, node]], before)
            np.testing.assert_allclose(second[row, node], wanted[-1], atol=2e-5)
            if node == ends[row]:
                for mine, theirs in zip(memory.columns, after[0], strict=True):
                    np.testing.assert_allclose(mine[row], theirs, atol=2e-5)
                if memory.state is not None:
                    assert after[1] is not None
                    np.testing.assert_allclose(memory.state[row], after[1], atol=2e-5)
