"""python -m bench.laws: check the promises of speculation on this device, in this precision.

The auditor compares each proposer with a reference that reads whole texts anew, and the bits of its
cache with plain decoding at the width of its step.  Then one prompt and one key are decoded
with every number of drafts at that width, which must give one text.  Passes of other widths may
give other texts in bfloat16, so these texts are only counted.  The exit status is 1 if a promise is
broken.  Where attention is a kernel of our own, its logits and its time are printed beside those of
XLA's.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np

from bench.command import run
from bench.weights import SIZES, Pair, random_on_device
from specjax import Decoder, DraftModel, Match, NGram, NoProposer, Params, Sampling, audit, make_key
from specjax.contract import Proposer
from specjax.models import attend
from specjax.options import fields
from specjax.options.command import parse
from specjax.types import Arrays, DecodeState

_PROMPTS, _LENGTH = 4, 16


@dataclasses.dataclass(frozen=True)
class LawsOptions(fields.Options):
    """The options of `python -m bench.laws`."""

    size: str = fields.option("110m", "size of the random weights", choices=sorted(SIZES))
    vocab_size: int = fields.option(32000, "vocabulary size")
    dtype: str = fields.option("bfloat16", "type of the weights")
    num_drafts: tuple[int, ...] = fields.option((1, 4), "numbers of drafts")
    new_tokens: int = fields.option(64, "tokens of a text")


def main(argv: list[str] | None = None) -> None:
    arguments = parse(LawsOptions, argv, __doc__, "python -m bench.laws")
    pair = random_on_device(arguments.size, arguments.vocab_size, arguments.dtype)
    prompts = np.random.default_rng(0).integers(
        1, arguments.vocab_size, (_PROMPTS, _LENGTH), dtype=np.int32
    )
    print(
        f"{arguments.size}, {arguments.dtype}, {jax.devices()[0].device_kind}, "
        f"jax {jax.__version__}\n"
    )
    passed = True
    for gamma in arguments.num_drafts:
        for name, (proposer, arrays) in proposers(pair, gamma).items():
            decoder = Decoder(pair.target.model, proposer, Match(), (), 256)
            params = Params(pair.target.params, arrays)
            report = audit(
                decoder,
                params,
                prompts.tolist(),
                max_new_tokens=arguments.new_tokens,
                samples=64,
                rows=16,
                top_k=4,
            )
            same = drafts_of_one_width(decoder, params, prompts[0], arguments.new_tokens)
            verdict = "one text" if same else "FAIL: several texts"
            print(f"{name}: {report}\n  0 to {gamma} drafts, one key: {verdict}\n")
            passed = passed and report.passed and same
    print(of_all_widths(pair, prompts, arguments.num_drafts, arguments.new_tokens))
    print(of_attention(pair, prompts, arguments.new_tokens))
    sys.exit(not passed)


def proposers(pair: Pair, gamma: int) -> dict[str, tuple[Proposer, Arrays]]:
    """A proposer that is mostly right, one that is mostly wrong, and prompt lookup."""
    target, draft, size = pair.target, pair.draft, pair.target.model.vocab_size
    assert draft is not None
    return {
        "the target as its own draft": (DraftModel(target.model, size, gamma), target.params),
        "a random draft": (DraftModel(draft.model, size, gamma), draft.params),
        "prompt lookup": (NGram(gamma), None),
    }


def drafts_of_one_width(decoder: Decoder, params: Params, prompt: np.ndarray, new: int) -> bool:
    """Is the text of one prompt and key the same in rows with at most 0, 1, 2, ... drafts?"""
    deep = np.arange(decoder.proposer.max_depth + 1, dtype=np.int32)
    texts = _decode(
        decoder, params, np.tile(prompt, (len(deep), 1)), new, np.zeros_like(deep), deep
    )
    return bool((texts == texts[0]).all())


def of_all_widths(pair: Pair, prompts: np.ndarray, lookaheads: Sequence[int], new: int) -> str:
    """How many texts of plain decoding stay the same when the target's passes are wider."""
    keys, lines = np.arange(len(prompts)), []
    plain = Decoder(pair.target.model, NoProposer(), Match(), (), 256)
    reference = _decode(plain, Params(pair.target.params), prompts, new, keys)
    for width in (gamma + 1 for gamma in lookaheads):
        wide = dataclasses.replace(plain, proposer=NoProposer(width))
        same = (
            (_decode(wide, Params(pair.target.params), prompts, new, keys) == reference)
            .all(1)
            .sum()
        )
        lines.append(
            f"plain at {width} rows: {same} of {len(prompts)} texts as at one row (no claim)"
        )
    return "\n".join(lines)


def of_attention(pair: Pair, prompts: np.ndarray, new: int) -> str:
    """The logits of a verification, and the time of a step, with our attention and with XLA's."""
    model, made = pair.target.model, pair.target.model.module.attend
    if made is attend:
        return "attention is XLA's here"
    logits, times = [], []
    for form in (made, attend):
        other = dataclasses.replace(model, module=model.module.clone(attend=form))
        decoder = Decoder(other, NoProposer(5), Match(), (), 256)
        params = Params(pair.target.params)
        state = _prefilled(decoder, params, prompts, new, np.arange(len(prompts)))
        proposal, state = decoder.propose(params, state)
        logits.append(np.asarray(decoder.verify(params, state, proposal).output.logits[:, 0]))
        seconds = []
        for _ in range(5):
            state = jax.block_until_ready(
                _prefilled(decoder, params, prompts, new, np.arange(len(prompts)))
            )
            began = time.perf_counter()
            jax.block_until_ready(decoder.run(params, state, new))
            seconds.append((time.perf_counter() - began) / new)
        times.append(1000 * statistics.median(seconds[1:]))
    difference = np.abs(logits[0] - logits[1]).max() / np.ptp(logits[1])
    return (
        f"attention in a kernel: {times[0]:.2f} ms a step of 5 nodes, XLA's {times[1]:.2f} ms; the "
        f"logits differ by {difference:.1e} of their range"
    )


def _decode(
    decoder: Decoder,
    params: Params,
    prompts: np.ndarray,
    new: int,
    keys: np.ndarray,
    num_drafts: np.ndarray | None = None,
) -> np.ndarray:
    """New tokens [B, new] at temperature 1, drawn with the keys of the numbers `keys` [B]."""
    state = _prefilled(decoder, params, prompts, new, keys, num_drafts)
    return np.asarray(decoder.run(params, state).tokens)[
        :, prompts.shape[1] : prompts.shape[1] + new
    ]


def _prefilled(
    decoder: Decoder,
    params: Params,
    prompts: np.ndarray,
    new: int,
    keys: np.ndarray,
    num_drafts: np.ndarray | None = None,
) -> DecodeState:
    lengths = np.full(len(prompts), prompts.shape[1], np.int32)
    return decoder.prefill(
        params, prompts, lengths, limit=lengths + np.int32(new),
        sampling=Sampling.create(len(prompts), 1.0), key=jax.vmap(make_key)(keys),
        num_drafts=num_drafts,
    )  # fmt: skip


if __name__ == "__main__":
    run(main)
