"""Reinforcement learning with group-relative rewards (GRPO) whose old rollouts are drafts.

    python examples/grpo.py --steps 6
    python examples/grpo.py --steps 6 --no-drafts      # the same numbers, bit for bit

Reference: Shao et al. 2024, arXiv 2402.03300, section 4.1.  Each epoch goes over the same prompts
with fresh keys, so every rollout is a sample of the policy.  What it may be is looked up in earlier
rollouts of its prompt.  With --out a run that was stopped goes on, to the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization

import specjax
from specjax.rollouts import Memory, Sampler, rollout_keys

PROMPT, GROUP = 16, 4  # tokens of a prompt, and samples of each


def reward(prompt: str, text: str) -> float:
    """Returns the share of the characters that are lower-case letters."""
    return sum(c.islower() for c in text) / max(len(text), 1)


def prompts_of(target: specjax.LanguageModel, count: int) -> list[list[int]]:
    ids = target.tokenizer.encode(pathlib.Path(specjax.__file__).read_text()).ids
    return [ids[n : n + PROMPT] for n in np.linspace(0, len(ids) - PROMPT, count, dtype=int)]


def main(arguments: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description="GRPO on the shipped model.")
    parser.add_argument("--target", default=str(specjax.shipped("pycode/target")))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a step")
    parser.add_argument("--steps-per-epoch", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--refresh", default=1, help='epochs for which keys stay, or "never"',
                        type=lambda text: text if text == "never" else int(text))  # fmt: skip
    parser.add_argument("--no-drafts", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, help="to save to, and to go on from")
    options = parser.parse_args(arguments)

    target = specjax.load(options.target)
    model, tokenizer = target.model, target.tokenizer
    texts = prompts_of(target, options.steps_per_epoch * options.prompts)
    sampler = Sampler(target, slots=8, max_new_tokens=options.new_tokens, num_drafts=8)
    memory, optimizer = Memory(target), optax.adam(options.learning_rate)

    @jax.jit
    def update(params, moments, prompt, made, advantage):
        """One step up the rollouts' probabilities, weighted by the advantages."""

        def loss(params):
            whole = jnp.concatenate([prompt, made.tokens], axis=1)
            places = jnp.broadcast_to(jnp.arange(whole.shape[1]), whole.shape)
            logits = model.apply(params, whole, places).logits[:, PROMPT - 1 : -1]
            logp = jax.nn.log_softmax(logits.astype(jnp.float32))
            logp = jnp.take_along_axis(logp, made.tokens[..., None], axis=2)[..., 0]
            # Each rollout is used once: the old policy is this one, and the ratio is 1.
            ratio = jnp.exp(logp - jax.lax.stop_gradient(logp))
            return -jnp.where(made.mask, ratio * advantage, 0).sum() / made.mask.sum()

        slope = jax.grad(loss)(params)
        change, moments = optimizer.update(slope, moments, params)
        return optax.apply_updates(params, change), moments

    params = jax.tree.map(jnp.asarray, target.params)
    state, first = {"params": params, "moments": optimizer.init(params)}, 0
    if (out := options.out) is not None and (out / "state.msgpack").exists():
        stored = (out / "state.msgpack").read_bytes()
        kept = serialization.from_bytes({"step": 0, "state": state}, stored)
        state, first = kept["state"], kept["step"]
        memory.load(out / "memory.npz")
    rewards, surprises, passes, tokens, seconds = [], [], 0, 0, 0.0
    for step in range(first, options.steps):
        epoch, part = divmod(step, options.steps_per_epoch)
        prompts = texts[part * options.prompts : (part + 1) * options.prompts]
        keys = rollout_keys(options.seed, prompts, GROUP, epoch=epoch, refresh=options.refresh)
        old = None if options.no_drafts else memory.documents(prompts, GROUP)
        started = time.perf_counter()
        made = sampler.sample(prompts, keys, samples=GROUP, params=state["params"], documents=old)
        words = made.texts
        seconds += time.perf_counter() - started
        memory.put(prompts, words, GROUP)
        asked = [tokenizer.decode(each) for each in prompts for _ in range(GROUP)]
        earned = np.array([*map(reward, asked, map(tokenizer.decode, words))], np.float32)
        spread = (groups := earned.reshape(-1, GROUP)).std(1, keepdims=True) + 1e-4
        advantage = ((groups - groups.mean(1, keepdims=True)) / spread).reshape(-1, 1)
        prompt = jnp.repeat(jnp.array(prompts, jnp.int32), GROUP, axis=0)
        state["params"], state["moments"] = update(*state.values(), prompt, made, advantage)
        rewards.append(float(earned.mean()))
        surprises.append(float(-made.raw_logprobs.sum() / made.mask.sum()))
        passes, tokens = passes + made.passes, tokens + sum(map(len, words))
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            memory.save(out / "memory.npz")
            new = out / "state.new"
            new.write_bytes(serialization.to_bytes({"step": step + 1, "state": state}))
            new.replace(out / "state.msgpack")
    weights = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(state["params"]))
    return {"rewards": rewards, "weights": hashlib.sha256(weights).hexdigest(),
            "entropies": surprises, "tokens_per_pass": tokens / max(passes, 1),
            "sampling_seconds": round(seconds, 2)}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
