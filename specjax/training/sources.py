"""Where the sequences of a distillation come from: text, the target, and the draft.

A part of the data has its share of the sequences over the steps of a run, however small a batch is.
"""

from __future__ import annotations

import math
import pathlib
from typing import Any

import numpy as np

from specjax.decoding import Decoder
from specjax.models import LanguageModel
from specjax.proposers import NoProposer
from specjax.rules import Match
from specjax.training import accepted, dataset
from specjax.training.corpus import Tokens
from specjax.training.dataset import Request, Written
from specjax.types import Params

TEXT, TARGET, DRAFT = range(3)


def sources(options: Any, step: int) -> tuple[list[int], list[int]]:
    """Which rows of TEXT, TARGET and DRAFT a batch reads: the first of each, and how many.  It is a
    function of the step."""
    rows, shares = options.batch_size, (options.sampled_fraction, options.draft_fraction)
    if options.online or options.mix == "batch":
        drawn = np.random.default_rng((options.seed, 2, step)).random()
        part = TARGET if drawn < shares[0] else DRAFT if drawn < sum(shares) else TEXT
        counts = [0, 0, 0]
        counts[TEXT if options.online else part] = rows
        return [step * count for count in counts], counts
    before, after = (_taken(number * rows, *shares) for number in (step, step + 1))
    return before, [b - a for a, b in zip(before, after, strict=True)]


def _taken(rows: int, target: float, draft: float) -> list[int]:
    """How many of the first `rows` sequences of a run are of each part, to within one sequence.

    The sum over steps is rounded, and not each batch, which would round a share of less than half a
    sequence to nothing.  The draft's rows are rounded among those that the target leaves: so no
    part of a batch is ever negative.
    """
    written = math.floor(rows * target + 0.5)
    left = rows - written
    own = math.floor(left * min(1.0, draft / (1 - target)) + 0.5) if target < 1 else 0
    return [left - own, written, own]


def sample(
    target: LanguageModel, text: Tokens, options: Any, folder: pathlib.Path, hashes: Any
) -> None:
    """Let the target continue windows of text into a dataset."""
    o, length = options, options.sequence_length + 1
    # An end of text ends a sequence only where documents are isolated; else the next document
    # follows, as in the text.
    eos = target.eos if o.isolate_documents else ()
    decoder = Decoder(target.model, NoProposer(), Match(), eos, length)
    request = Request(
        hashes, o.sampled_sequences, o.sampled_batch, length - o.sampled_prompt, o.settings, o.seed, 0,
        f"{o.sampled_prompt} tokens of {text.inputs['text']}",
    )  # fmt: skip

    def prompts(number):
        rows = min(o.sampled_batch, o.sampled_sequences - number * o.sampled_batch)
        return text.batch(number, o.sampled_batch, o.sampled_prompt - 1, o.seed + 1)[:rows].tolist()

    dataset.write(folder, request, decoder, Params(target.params), prompts, None)


def with_starts(written: Written, num_drafts: int) -> Written:
    """The rows in which a chain of guesses starts; the number of the others stands on stdout.

    Raises:
      ValueError: there is none.
    """
    there = accepted.starts(written.drawn, written.limit, num_drafts).any(1)
    if not there.any():
        raise ValueError(
            f"--num-drafts {num_drafts}: every text of the target's is cut before so many tokens; "
            "write longer ones (train.generate --max-new-tokens), or raise --sequence-length"
        )
    if not there.all():
        short = f"{(~there).sum()} of {len(there)} sequences"
        print(f"passed over {short}: they are cut before --num-drafts {num_drafts} tokens")
    return written.at(there)
