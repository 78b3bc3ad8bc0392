"""The three sources of the sequences of a distillation: text, the target, and the draft.

Over the steps of a run each source gets its share of the sequences, however small a batch is.
"""

from __future__ import annotations

import math
import pathlib
from typing import Any, Protocol

import numpy as np

from specjax.decoding import Decoder
from specjax.models import LanguageModel
from specjax.proposers import NoProposer
from specjax.rules import Match
from specjax.training import accepted, dataset
from specjax.training.corpus import Tokens
from specjax.training.dataset import Request
from specjax.training.material import Material
from specjax.training.mixture import Mixture
from specjax.training.targets import dtype_of
from specjax.training.written import Written
from specjax.types import Params

TEXT, TARGET, DRAFT = range(3)


class MixOptions(Protocol):
    """The options of a distillation that choose the sources of its sequences."""

    @property
    def batch_size(self) -> int: ...

    @property
    def sampled_fraction(self) -> float | None: ...

    @property
    def draft_fraction(self) -> float: ...

    @property
    def online(self) -> bool: ...

    @property
    def mix(self) -> str: ...

    @property
    def seed(self) -> int: ...


class BatchOptions(MixOptions, Protocol):
    """The options of the sources, and the length of a sequence."""

    @property
    def sequence_length(self) -> int: ...


class SampleOptions(Protocol):
    """The options of a distillation for text that the target writes."""

    @property
    def sequence_length(self) -> int: ...

    @property
    def isolate_documents(self) -> bool: ...

    @property
    def sampled_sequences(self) -> int: ...

    @property
    def sampled_prompt(self) -> int: ...

    @property
    def sampled_batch(self) -> int: ...

    @property
    def settings(self) -> dict[str, Any]: ...

    @property
    def seed(self) -> int: ...

    @property
    def dtype(self) -> str | None: ...


def share_of_target(asked: float | None, default: float, material: Material) -> float:
    """Returns the fraction of the sequences that the target wrote, for a run with this data.

    Args:
      asked: the option, or None.
      default: the fraction if there is text.
      material: the data.  Without text the fraction is 1, and its `share` is the default.
    """
    if asked is None:
        default = default if material.share is None else material.share
        return 1.0 if material.text is None else default
    if not asked and material.written is not None:
        print(
            f"note: --sampled-fraction 0 leaves the {len(material.written.tokens)} sequences with "
            "answers in --data unused",
            flush=True,
        )
    return asked


def sources(options: MixOptions, step: int) -> tuple[list[int], list[int]]:
    """Returns the rows that the batch of a step reads from TEXT, TARGET and DRAFT.

    Returns:
      For each source the number of its first row, and the number of rows.
    """
    rows, shares = options.batch_size, (options.sampled_fraction or 0.0, options.draft_fraction)
    if options.online or options.mix == "batch":
        drawn = np.random.default_rng((options.seed, 2, step)).random()
        source = TARGET if drawn < shares[0] else DRAFT if drawn < sum(shares) else TEXT
        counts = [0, 0, 0]
        counts[TEXT if options.online else source] = rows
        return [step * count for count in counts], counts
    before, after = (_taken(number * rows, *shares) for number in (step, step + 1))
    return before, [b - a for a, b in zip(before, after, strict=True)]


def mixed_rows(
    options: BatchOptions, step: int, text: Tokens | Mixture | None, written: Written | None
) -> tuple[dict[str, np.ndarray], list[int]]:
    """Returns the rows of a step: first those of text and the draft's own, then the target's.

    Returns:
      `tokens` [B, T + 1]; `drawn` [B, T] and `limit` [B], as in `Written`; and `number` [B], which
      no other row of the run has; `starts` [B, T] if sequences are packed.  Then the count of
      rows from each source.
    """
    o, rows, length = options, options.batch_size, options.sequence_length
    first, counts = sources(o, step)
    tokens, drawn = [], np.zeros((rows, length), np.float32)
    limit, starts = np.full(rows, length, np.int32), np.zeros((rows, length), bool)
    from_text = counts[TEXT] + counts[DRAFT]
    if from_text and text is not None:
        tokens.append(text.rows(first[TEXT] + first[DRAFT], from_text, length, o.seed))
    if counts[TARGET] and written is not None:
        taken = written.rows(first[TARGET], counts[TARGET], o.seed)
        tokens.append(taken.tokens)
        drawn[from_text:], limit[from_text:] = taken.drawn, taken.limit
        if taken.starts is not None:
            starts[from_text:] = taken.starts
    number = step * rows + np.arange(rows, dtype=np.int32)
    made = {
        "tokens": np.concatenate(tokens),
        "drawn": drawn,
        "limit": limit,
        "number": number,
    }
    if written is not None and written.starts is not None:
        made["starts"] = starts
    return made, counts


def _taken(rows: int, target: float, draft: float) -> list[int]:
    """Returns the number of the first `rows` sequences of a run that come from each source.

    The sum over all steps is rounded, since rounding each batch would turn a share of less than
    half a sequence into zero.  The draft's rows are rounded among those that are not the target's,
    so no count of a batch is ever negative.
    """
    written = math.floor(rows * target + 0.5)
    left = rows - written
    own = math.floor(left * min(1.0, draft / (1 - target)) + 0.5) if target < 1 else 0
    return [left - own, written, own]


def sample(
    target: LanguageModel,
    text: Tokens | Mixture,
    options: SampleOptions,
    folder: pathlib.Path,
    hashes: dict[str, str],
) -> None:
    """Lets the target continue windows of text into a dataset."""
    o, length = options, options.sequence_length + 1
    # An EOS ends a sequence only if documents are isolated.  Otherwise the target goes on with the
    # next document, as the text does.
    eos = target.eos if o.isolate_documents else ()
    decoder = Decoder(target.model, NoProposer(), Match(), eos, length)
    request = Request(
        hashes=hashes,
        sequences=o.sampled_sequences,
        batch=o.sampled_batch,
        new_tokens=length - o.sampled_prompt,
        settings=o.settings,
        seed=o.seed,
        top=0,
        prompts=f"{o.sampled_prompt} tokens of {text.inputs['text']}",
        dtype=dtype_of(o.dtype),
    )

    def prompts(number: int) -> list[list[int]]:
        rows = min(o.sampled_batch, o.sampled_sequences - number * o.sampled_batch)
        return text.batch(number, o.sampled_batch, o.sampled_prompt - 1, o.seed + 1)[:rows].tolist()

    dataset.write(folder, request, decoder, Params(target.params), prompts, None)


def with_starts(written: Written, num_drafts: int) -> Written:
    """Returns the rows in which a chain of drafts may start; prints how many were skipped.

    Raises:
      ValueError: no such row exists.
    """
    long = np.asarray(accepted.starts(written.drawn, written.limit, num_drafts).any(1))
    if not long.any():
        raise ValueError(
            f"--num-drafts {num_drafts}: every text of the target is cut before that many tokens; "
            "write longer ones (train.generate --max-new-tokens), or raise --sequence-length"
        )
    if not long.all():
        short = f"{(~long).sum()} of {len(long)} sequences"
        print(f"skipped {short}: they are cut before --num-drafts {num_drafts} tokens")
    return written.at(long)
