"""`python -m bench.predictions`: do the predictions of `specjax tune` hold on random weights?

The acceptance of the draft model is imposed (`bench.imposed`), so that a pair without training
accepts as many drafts as a trained one.  The costs are real.  Prompt lookup drafts as it does.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np

import specjax
from bench.command import run
from bench.imposed import Imposed, Script, coins
from bench.weights import SIZES, random_folders
from specjax.methods import Drafter, DraftModel
from specjax.options import fields
from specjax.options.command import parse
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


@dataclasses.dataclass(frozen=True)
class PredictionsOptions(fields.Options):
    """The options of `python -m bench.predictions`."""

    size: str = fields.option("110m", "of the weights", choices=sorted(SIZES))
    vocab_size: int = fields.option(32000, "of both models")
    dtype: str = fields.option("float32", "float32 or bfloat16")
    acceptance: float = fields.option(0.8, "share of right drafts")
    batch: tuple[int, ...] = fields.option((1, 4, 16), "numbers of rows")
    new_tokens: int = fields.option(64, "of each row")
    rounds: int = fields.option(3, "measured turns")

    def __post_init__(self) -> None:
        super().__post_init__()
        fields.inside(self, "[0, 1]", "acceptance")
        fields.inside(self, "[1, inf)", "new_tokens")
        if min(self.batch) < 1:
            raise ValueError(f"--batch is {min(self.batch)}; it must be at least 1")


def measure(
    target: specjax.LanguageModel,
    draft: specjax.LanguageModel,
    options: PredictionsOptions,
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


def main(argv: list[str] | None = None) -> None:
    options = parse(PredictionsOptions, argv, __doc__, "python -m bench.predictions")
    with tempfile.TemporaryDirectory() as folder:
        folders = random_folders(options.size, options.vocab_size, pathlib.Path(folder), "float32")
        target, draft = (specjax.load(path, options.dtype) for path in folders)
        for batch in options.batch:
            print(f"batch {batch}\n{measure(target, draft, options, batch)}", flush=True)


if __name__ == "__main__":
    run(main)
