"""The sequences of a run that its target writes, and their share."""

from __future__ import annotations

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

    windows = text.rows(o.sampled_prompt - 1, o.seed + 1)[: o.sampled_sequences].batch(
        o.sampled_batch
    )
    dataset.write(
        folder, request, decoder, Params(target.params),
        lambda number: windows[number]["tokens"].tolist(), None,
    )  # fmt: skip


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
