"""`python -m bench.predictions`: do the predictions of `specjax tune` hold on random weights?

The acceptance of the draft model is imposed (`bench.imposed`), so that a pair without training
accepts as many drafts as a trained one.  The costs are real.  Prompt lookup drafts as it does.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np

import specjax
from bench.command import run
from bench.imposed import Imposed, Script, coins
from bench.weights import SIZES, random_folders
from specjax.methods import Drafter, DraftModel
from specjax.tuning import Plan

_DEPTH, _PROMPT = 8, 64


def imposed(
    target: specjax.LanguageModel,
    draft: specjax.LanguageModel,
    prompts: list[list[int]],
    new_tokens: int,
    acceptance: float,
) -> Drafter:
    """The draft model, of whose drafts for these prompts so many are right."""
    out = specjax.generate(
        target, prompts, proposer="none", temperature=0.0, max_new_tokens=new_tokens
    )
    right = coins(len(prompts), new_tokens, acceptance, (2, 4, _DEPTH))
    text = np.zeros((len(prompts), _PROMPT + new_tokens + _DEPTH + 1), np.int32)
    known = np.zeros(text.shape, bool)
    for row, (prompt, tokens) in enumerate(zip(prompts, out.tokens, strict=True)):
        whole = [*prompt, *tokens]
        text[row, : len(whole)] = whole
        known[row, _PROMPT : _PROMPT + new_tokens] = right[row]
    proposer = Imposed(
        DraftModel(draft.model, target.model.vocab_size, _DEPTH), target.model.vocab_size
    )
    script = Script(draft.params, jnp.asarray(text), jnp.asarray(known))
    return Drafter(proposer, script, f"draft, acceptance {acceptance}")


def measure(
    target: specjax.LanguageModel,
    draft: specjax.LanguageModel,
    options: argparse.Namespace,
    batch: int,
) -> Plan:
    """The plan for one number of rows."""
    rng = np.random.default_rng(batch)
    prompts = rng.integers(3, target.model.vocab_size, (batch, _PROMPT)).tolist()
    drafter = imposed(target, draft, prompts, options.new_tokens, options.acceptance)
    return specjax.tune(
        target,
        drafter,
        prompts,
        batch=batch,
        max_new_tokens=options.new_tokens,
        rounds=options.rounds,
        save=False,
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(prog="python -m bench.predictions", description=__doc__)
    made.add_argument("--size", choices=sorted(SIZES), default="110m", help="of the weights")
    made.add_argument("--vocab-size", type=int, default=32000, help="of both models")
    made.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    made.add_argument("--acceptance", type=float, default=0.8, help="share of right drafts")
    made.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16], help="numbers of rows")
    made.add_argument("--new-tokens", type=int, default=64, help="of each row")
    made.add_argument("--rounds", type=int, default=3, help="measured turns")
    options = made.parse_args(argv)
    if not 0 <= options.acceptance <= 1:
        raise ValueError(f"--acceptance is {options.acceptance}; it must lie between 0 and 1")
    for name, number in (("batch", min(options.batch)), ("new-tokens", options.new_tokens)):
        if number < 1:
            raise ValueError(f"--{name} is {number}; it must be at least 1")
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        folders = random_folders(options.size, options.vocab_size, pathlib.Path(folder), "float32")
        target, draft = (specjax.load(path, options.dtype) for path in folders)
        for batch in options.batch:
            print(f"batch {batch}\n{measure(target, draft, options, batch)}", flush=True)


if __name__ == "__main__":
    run(main)
