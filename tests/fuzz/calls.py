"""Cases of calls: arguments of the public functions, and requests of `generate`."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np

import specjax
from specjax.generation import Prepared
from specjax.models import Rope
from tests.fuzz import bases, values
from tests.fuzz.law import Case
from tests.preparing import prepared


def _value(rng: random.Random, honest: Any) -> Any:
    """A hostile value, one near an honest one, or one of another library."""
    act = rng.random()
    if act < 0.5:
        return values.some(rng)
    if act < 0.8:
        return values.near(rng, honest) if rng.random() < 0.6 else values.changed(rng, honest)
    return rng.choice(
        (
            np.float32(np.nan), np.int64(3), np.zeros(2), np.zeros((1, 2), np.int32), np.array("x"),
            object(), int, print, b"bytes", 1j, range(3), {1, 2}, (1, "a"), bytearray(2), ...,
            lambda *_: None, np.bool_(True), np.array([None]), float, specjax.Match,
        )
    )  # fmt: skip


_RECORD = {
    "vocab_size": 32, "hidden_size": 8, "mlp_size": 8, "num_layers": 2, "num_heads": 2,
    "num_kv_heads": 1, "head_dim": 4, "max_positions": 64, "norm": "rms", "norm_eps": 1e-5,
    "norm_order": "pre", "qk_norm": "head", "query_scale": 0.5, "windows": (4, None),
    "rope": Rope(), "activation": "silu", "gated": True, "num_experts": 2,
    "experts_per_token": 1, "expert_size": 8,
    "sparse": (True, False), "init_scale": 0.02, "family": "llama", "logit_softcap": 3.0,
}  # fmt: skip


class Arguments:
    """Arguments of public functions and classes, one of them hostile."""

    def __init__(self, root: pathlib.Path) -> None:
        self.target = target = bases.model("llama", num_layers=2)
        self.folder = str(bases.write("gpt2", root / "gpt2"))
        heads = specjax.MedusaAdapter.create(target, 2)
        made = str(root / "medusa")
        specjax.save_medusa(made, heads, "t")
        draft = functools.partial(specjax.DraftModel, target.model, bases.VOCAB)
        tree = functools.partial(specjax.DraftTree, target.model, bases.VOCAB)
        source = specjax.DraftSource(target.model, bases.VOCAB)
        exits = functools.partial(specjax.EarlyExit, target.model)
        words = bases.tokenizer()
        numbers = {"temperature": 1.0, "top_k": 3, "top_p": 0.9, "min_p": 0.1}
        bans = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5,
                "logit_bias": {1: 2.0}, "bad_words": [[1, 2]], "min_new_tokens": 2}  # fmt: skip
        rope = {"theta": 1e4, "kind": "yarn", "fraction": 0.5, "factor": 2.0, "truncate": True,
                "original_max_positions": 64, "factors": (1.0,)}  # fmt: skip
        numerics = {"dtype": "float32", "precision": "high", "revision": None}
        levels = {"depth": 2, "width": 2, "num_nodes": 5}
        tables = {"target_size": 300, "draft_size": 300, "same": [(0, 0)], "max_pieces": 4}
        self.calls: list[tuple[Callable[..., object], dict[str, Any]]] = [
            (functools.partial(specjax.load, self.folder), numerics),
            (specjax.load, {"path": self.folder}),
            (specjax.load_medusa, {"path": made, "target": target}),
            (specjax.TransformerConfig, _RECORD),
            (Rope, rope),
            (specjax.NGram, {"num_drafts": 4, "max_ngram": 3, "min_ngram": 2, "may_abstain": True}),
            (draft, {"num_drafts": 3, "confidence_threshold": 0.5}),
            (tree, {"branching": (2, 1)}),
            (functools.partial(specjax.DynamicTree, source), levels),
            (exits, {"exit_layer": 1, "num_drafts": 2}),
            (specjax.Medusa, {"heads": heads.heads, "choices": ((0,), (1,), (0, 0))}),
            (specjax.FirstOf, {"first": specjax.NGram(), "second": specjax.NGram()}),
            (specjax.Typical, {"posterior_threshold": 0.1, "posterior_alpha": 0.3}),
            (specjax.Threshold, {"threshold": 0.3, "mean": False}),
            (functools.partial(specjax.Sampling.create, 2), numbers),
            (functools.partial(specjax.Processors.create, 2, bases.VOCAB), bans),
            (functools.partial(specjax.make_drafter, target), {"draft": target}),
            (functools.partial(specjax.translate, words, words), tables),
        ]  # fmt: skip

    def case(self, rng: random.Random) -> Case:
        call, honest = rng.choice(self.calls)
        name = rng.choice(sorted(honest))
        value = _value(rng, honest[name])
        return Case(lambda: call(**{**honest, name: value}), (name, *self._also(name)))

    @staticmethod
    def _also(name: str) -> tuple[str, ...]:
        """What a message may call the argument."""
        return {
            "path": ("is not a folder", "config.json", "File name too long"),
            "num_layers": ("layers",),
        }.get(name, ())


class Requests:
    """Calls of `generate` up to where something would be compiled."""

    def __init__(self, root: pathlib.Path) -> None:
        self.target = dataclasses.replace(
            bases.model("llama"),
            files={"chat_template.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}"},
        )
        small = bases.model("qwen3")
        self.honest: dict[str, Any] = {
            "prompts": ["the cat", "the dog"], "chat_template_kwargs": {"a": 1}, "draft": small,
            "draft_dtype": "int8", "proposer": "ngram", "adapter": "x", "rule": "match",
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "num_drafts": 3,
            "max_new_tokens": 4, "temperature": [1.0, 0.5], "top_k": 3, "top_p": 0.9,
            "min_p": 0.1,
            "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5,
            "logit_bias": {1: 2.0}, "bad_words": ["dog", [1, 2]], "min_new_tokens": 1,
            "eos": [[0], [1]],
            "logits_processor": None, "seed": [1, 2], "stop": ["x"], "logprobs": 2, "stream": True,
            "mesh": None, "drafter": None, "messages": [{"role": "user", "content": "the cat"}],
        }  # fmt: skip

    def case(self, rng: random.Random) -> Case:
        chosen = rng.sample(
            sorted(set(self.honest) - {"prompts", "messages"}), rng.choice((0, 0, 1, 3))
        )
        options = {name: self.honest[name] for name in chosen}
        name = rng.choice(sorted(self.honest))
        if name not in ("messages", "chat_template_kwargs") or rng.random() < 0.2:
            options["prompts"] = self.honest["prompts"]
        options[name] = _value(rng, self.honest[name])
        if rng.random() < 0.02:
            options[rng.choice(("max_tokens", "x", "Temperature"))] = 1

        def check(call: object) -> None:
            assert isinstance(call, Prepared)
            assert call.prompt.dtype == np.int32 and call.new >= 1

        words = (*options, "path=", "num_drafts", "prompt", "messages", "argument", "chat template")
        return Case(lambda: prepared(self.target, **options), words, check)
