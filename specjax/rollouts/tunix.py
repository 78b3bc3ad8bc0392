"""`SpecjaxRollout`: a rollout worker for google-tunix, with the extra `tunix`.

    functools.partial(SpecjaxRollout, target=target)   ->   ClusterConfig.rollout_engine
    generate(prompts)        to an engine, from any number of threads; one batch for all of them
    update_params(state)     new weights in the engine, which then forgets what it has read

The interface is `BaseRollout` of tunix 0.1.7 (`tunix/rl/rollout/base_rollout.py`).  This module
imports tunix, so `specjax.rollouts` does not import it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax._internal.checks import settle, shown, typed, whole
from specjax._internal.extras import install
from specjax.generation import Request
from specjax.methods import Drafter
from specjax.models import LanguageModel
from specjax.rollouts.keys import prompt_digest
from specjax.serve import Engine, Handle
from specjax.types import Weights

try:
    from tunix.rl.rollout.base_rollout import (  # pyright: ignore[reportMissingImports]
        BaseRollout,
        RolloutConfig,
        RolloutOutput,
    )
except ImportError as missing:
    raise ImportError(
        f"specjax.rollouts.tunix needs google-tunix ({missing}): {install('tunix')}"
    ) from missing

ToParams = Callable[[Any, Any, Weights], Weights]
"""`(state, filter_types, now) -> weights`: the target's weights from what a trainer sends."""


class SpecjaxRollout(BaseRollout):
    """Samples for tunix with an engine of specjax.

    - A prompt that comes again, in one call or another, is another sample: its key follows from
      `run`, the prompt's tokens and how often it came.  So texts do not depend on the order of a
      batch, and the samples of a group are no clones.  A `RolloutConfig` with a `seed` starts to
      count again with each update of the weights: the same prompts have the same keys then, and
      old texts are drafts.  That is for evaluation.  Without a seed keys are fresh, as training
      needs: a key whose rollout was trained on is no sample of the new weights.
    - An EOS stays at the end of the tokens.  The pad token is never drawn, since tunix masks by it.
    - Log-probabilities are of the distribution that a token was drawn from.  Without top-p and
      top-k they are log_softmax(logits / temperature), as tunix expects.

    Example:
      >>> engine = functools.partial(SpecjaxRollout, target=target)   # doctest: +SKIP
      >>> ClusterConfig(rollout_engine=engine, ...)                   # doctest: +SKIP
    """

    def __init__(
        self,
        rollout_actor: Any = None,
        tokenizer: Any = None,
        mesh: Any = None,
        rollout_config: RolloutConfig | Mapping[Any, RolloutConfig] | None = None,
        *,
        target: LanguageModel,
        to_params: ToParams | None = None,
        drafters: Mapping[str, Drafter] | None = None,
        slots: int = 8,
        capacity: int | None = None,
        expected: int = 8,
        run: int = 0,
        memory: int = 2**16,
    ) -> None:
        """Starts an engine.

        Args:
          rollout_actor, tokenizer, mesh, rollout_config: what tunix passes.
          target: the model with the first weights; loaded with mesh= if it is split.
          to_params: makes the target's weights of the state that tunix sends.  By default the
            state has the names, shapes and types of `target.params`.
          drafters: as for `Engine`; the first one drafts.
          slots: texts that are decoded at once.
          capacity: the most tokens of a prompt with its text; by default those of the longest
            prompt and text in `rollout_config`.
          expected: drafts of a step from old texts.
          run: a number that all keys depend on.
          memory: the most old texts that are kept for keys that come again.

        Raises:
          ValueError: a setting that cannot be used, or a pad token that ends texts.
        """
        typed("what specjax.load(folder) returns", LanguageModel, target=target)
        settle(
            (
                target.keeps_bfloat16,
                f"{target.name} keeps matrices in bfloat16, which would round the weights that "
                "tunix trains; load it without keep_bfloat16=True",
            )
        )
        configs = list(rollout_config.values()) if isinstance(rollout_config, Mapping) else [
            rollout_config
        ]  # fmt: skip
        configs = [config for config in configs if config is not None]
        if tokenizer is None or not configs:
            raise ValueError("pass tokenizer= and rollout_config=, as tunix does")
        self._tokenizer, self._run = tokenizer, whole("run", run, 0, 2**63, "a whole number")
        self._pad, self._eos = int(tokenizer.pad_id()), int(tokenizer.eos_id())
        self._to_params = to_params or _same_names
        for config in configs:
            self._ends(config)
        room = max(
            _padded(config.max_prompt_length) + config.max_tokens_to_generate for config in configs
        )
        room = room if capacity is None else whole("capacity", capacity, 2, 2**24, "2 or more")
        self._engine = Engine(
            target, drafters, slots=slots, capacity=min(room, target.model.max_positions + 1),
            waiting=2**20, logprobs=0, expected=expected, default=None if drafters else "none",
        )  # fmt: skip
        self._lock = threading.Lock()
        self._drawn: collections.Counter[tuple[object, str]] = collections.Counter()
        self._memory, self._most = collections.OrderedDict[object, list[int]](), memory
        self.version = 0  # updates of the weights so far

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """Samples a text of each prompt; threads may call it at once.

        Args:
          prompts: texts; one that is repeated gets other samples.
          rollout_config: of this call.

        Raises:
          ValueError: a setting or a prompt that cannot be used.
        """
        del kwargs  # of other workers
        ids = [self._encode(prompt) for prompt in prompts]
        seed = None if rollout_config.seed is None else _number(rollout_config.seed)
        handles: list[tuple[object, Handle]] = []
        try:
            for tokens in ids:
                handles.append(self._submit(tokens, rollout_config, seed))
            served = [handle.result() for _, handle in handles]
        except BaseException:
            for _, handle in handles:
                handle.cancel()
            raise
        if seed is not None:
            with self._lock:
                for (key, _), one in zip(handles, served, strict=True):
                    self._memory[key] = one.tokens
                    self._memory.move_to_end(key)
                while len(self._memory) > self._most:
                    self._memory.popitem(last=False)
        width = _padded(max([rollout_config.max_prompt_length, *map(len, ids)]),
                        rollout_config.max_prompt_length)  # fmt: skip
        padded = np.full((len(ids), width), self._pad, np.int32)
        for row, tokens in zip(padded, ids, strict=True):
            row[width - len(tokens) :] = tokens
        greedy = rollout_config.temperature == 0
        logprobs = None
        if rollout_config.return_logprobs:
            logprobs = [np.asarray(_kept(one.logprobs, greedy), np.float32) for one in served]
        return RolloutOutput(
            text=[one.text for one in served],
            logits=None,  # type: ignore[arg-type] - as other workers
            tokens=[np.array(one.tokens, np.int32) for one in served],
            left_padded_prompt_tokens=padded,
            logprobs=logprobs,
        )

    def get_per_token_logps(self, prompt_tokens: Array, completion_tokens: Array) -> Array:
        """Returns the log-probabilities [B, C] of completions at temperature 1.

        Args:
          prompt_tokens: [B, P] padded on the left.
          completion_tokens: [B, C] padded on the right; padding has any number here.
        """
        target = self._engine.target
        return _log_probabilities(
            target.model, target.params, jnp.asarray(prompt_tokens), jnp.asarray(completion_tokens),
            self._pad,
        )  # fmt: skip

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Gives the engine new weights; nothing that it had read is used any more.

        Args:
          params: the state that tunix sends; with LoRA only the leaves of the LoRA.
          filter_types: the types of these leaves.

        Raises:
          ValueError: weights of other names, shapes or types, or texts that are being written.
        """
        target = self._engine.target
        new = self._to_params(params, filter_types, target.params)
        placed = _placed(new, target.params)
        self._engine.update_weights(dataclasses.replace(target, params=placed))
        with self._lock:
            self.version += 1
            for key in [key for key in self._drawn if key[0] is not None]:
                del self._drawn[key]

    def pad_id(self) -> int:
        return self._pad

    def eos_id(self) -> int:
        return self._eos

    def model(self) -> None:
        """None: the weights are in the engine, and in no nnx module."""

    def close(self) -> None:
        """Stops the engine."""
        self._engine.close(finish=False)

    def _submit(
        self, tokens: list[int], config: RolloutConfig, seed: int | None
    ) -> tuple[object, Handle]:
        digest = prompt_digest(tokens)
        with self._lock:
            number = self._drawn[(seed, digest)]
            self._drawn[(seed, digest)] += 1
            key = (seed, digest, number)
            old = self._memory.get(key)
        named = hashlib.sha256(repr((self._run, *key)).encode()).digest()
        banned = {self._pad: -np.inf} if self._pad < self._engine.target.model.vocab_size else None
        request = Request(
            prompts=[tokens],
            max_new_tokens=config.max_tokens_to_generate,
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=0 if config.top_k in (None, -1) else config.top_k,
            min_p=0.0,
            repetition_penalty=1.0,
            logit_bias=banned,
            eos=self._ends(config),
            seed=int.from_bytes(named[:4], "little"),
            logprobs=0,
            expected=None if old is None else [old],
        )
        index = int.from_bytes(named[4:8], "little") >> 1
        return key, self._engine.submit(request, index)

    def _encode(self, prompt: str) -> list[int]:
        """Returns the tokens of a prompt, which begin with one BOS if the tokenizer has it."""
        ids = list(self._tokenizer.encode(prompt))
        bos = self._tokenizer.bos_id()
        if bos is None or int(bos) < 0:
            return ids
        kept = ids
        while kept and kept[0] == bos:
            kept = kept[1:]
        return [int(bos), *kept]

    def _ends(self, config: RolloutConfig) -> list[int]:
        ends = [self._eos] if config.eos_tokens is None else [int(x) for x in config.eos_tokens]
        settle(
            (
                self._pad in ends,
                f"the pad token {self._pad} ends texts (eos {ends}), and tunix masks tokens by it: "
                "a text would lose its end; give the tokenizer a pad token of its own",
            )
        )
        return ends


def _number(seed: object) -> int:
    """Returns the seed of a call, a number or a PRNG key, as a number."""
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = np.asarray(seed).reshape(-1)
    if words.size == 0 or not np.issubdtype(words.dtype, np.integer):
        raise ValueError(f"seed={shown(seed)}; pass a whole number, or a PRNG key")
    return int.from_bytes(words.astype(np.int64).tobytes(), "little", signed=False)


def _padded(longest: int, least: int = 1) -> int:
    """Returns the width of prompts: `least`, or the next power of two for longer ones."""
    return least if longest <= least else 1 << (longest - 1).bit_length()


def _kept(logprobs: Any, greedy: bool) -> np.ndarray:
    return logprobs.raw if greedy else logprobs.warped


def _same_names(state: Any, filter_types: Any, now: Weights) -> Weights:
    """Takes a state, or a tree of arrays, that has the names of the target's weights."""
    new = state.to_pure_dict() if hasattr(state, "to_pure_dict") else state
    if jax.tree.structure(new) != jax.tree.structure(now):
        raise ValueError(
            "the state that tunix sent has other names than target.params (with LoRA it has the "
            "leaves of the LoRA alone): pass to_params=, a function (state, filter_types, now) -> "
            "weights that renames, or merges, them"
        )
    return new


def _placed(new: Weights, now: Weights) -> Weights:
    """Returns weights of the types and on the devices of the present ones."""

    def place(new: Array, now: Array) -> Array:
        new = jnp.asarray(new)
        new = new if new.dtype == now.dtype or new.shape != now.shape else new.astype(now.dtype)
        return new if new.sharding == now.sharding else jax.device_put(new, now.sharding)

    return jax.tree.map(place, new, now)


@functools.partial(jax.jit, static_argnums=0)
def _log_probabilities(
    model: Any, params: Weights, prompt: Array, completion: Array, pad: int
) -> Array:
    rows, width = prompt.shape
    whole_text = jnp.concatenate([prompt, completion], axis=1)
    # The pads of a prompt are its first tokens; a pad further back is one of its own.
    start = jnp.argmax(prompt != pad, axis=1)
    order = (jnp.arange(whole_text.shape[1]) + start[:, None]) % whole_text.shape[1]
    text = jnp.take_along_axis(whole_text, order, axis=1)
    text = jnp.minimum(text, model.vocab_size - 1)
    places = jnp.broadcast_to(jnp.arange(text.shape[1]), text.shape)
    logits = model.apply(params, text, places).logits
    at = (width - start)[:, None] + jnp.arange(completion.shape[1]) - 1
    chosen = jnp.take_along_axis(logits, at[..., None], axis=1).astype(jnp.float32)
    logp = jax.nn.log_softmax(chosen)
    ids = jnp.minimum(completion, model.vocab_size - 1)
    return jnp.take_along_axis(logp, ids[..., None], axis=2)[..., 0].reshape(rows, -1)
