"""The sequences of a run that its target writes, and their share."""

from __future__ import annotations

import abc
import dataclasses
import pathlib
from typing import TypeVar

import numpy as np

from specjax import decoding, rules
from specjax.models import LanguageModel
from specjax.options.fields import count, option
from specjax.training import accepted, dataset
from specjax.training.corpus import Tokens
from specjax.training.dataset import Request, model_hashes
from specjax.training.material import Material, gather
from specjax.training.mixture import Mixture
from specjax.training.recordings import TaughtOptions
from specjax.training.targets import ServedOptions, dtype_of
from specjax.training.written import Written
from specjax.types import Params


@dataclasses.dataclass(frozen=True)
class SampledOptions(TaughtOptions, ServedOptions):
    """The sequences that a target writes for a run."""

    group = "sampling"

    sampled_fraction: float | None = option(
        None,
        "fraction of the sequences with answers: those in --data, else those that the target then "
        "writes; default: 1 without text; beside text 0.5 in train.distill (1 for "
        "accepted-length), and 0.5 in train.drafter if --data has both, else 0",
        "[0, 1]",
    )
    sampled_sequences: int = count(1024, "how many sequences the target writes")
    sampled_prompt: int = count(32, "tokens of text that a model continues")
    sampled_batch: int = count(16, "sequences that the target writes at once")
    online: bool = option(
        False,
        "learn only inside speculation, from the accepted and rejected drafts that are made while "
        "the target continues the texts",
    )

    @property
    @abc.abstractmethod
    def settings(self) -> dict[str, float]:
        """Returns the settings of the sequences, as `Sampling.create` takes them."""

    @abc.abstractmethod
    def share_beside_text(self, has_answers: bool) -> float:
        """Returns the default of `--sampled-fraction` if there is text."""


SampledT = TypeVar("SampledT", bound=SampledOptions)


def sampled(
    options: SampledT, target: LanguageModel, exact: bool = False
) -> tuple[SampledT, Material]:
    """Returns the options with the share of sequences with answers, and the data.

    The target writes the sequences that are asked for.  `exact` is as for `gather`.

    Raises:
      ValueError: `--online` has no text; or as `gather`.
    """
    out = pathlib.Path(options.out)
    material = gather(options, target, out, options.sequence_length, options.settings, exact)
    text, written = material.text, material.written
    if options.online and text is None:
        raise ValueError(
            "--data holds only sequences of prompts and answers, and --online continues windows of "
            "text: add a folder of text"
        )
    default = options.share_beside_text(written is not None)
    share = share_of_target(options.sampled_fraction, default, material)
    if share and written is None and text is not None and not options.online:
        hashes = model_hashes(options.target, options.lora)
        sample(target, text, options, out / "sampled", hashes)
        rows = dataset.read_masked(out / "sampled", hashes)
        material = dataclasses.replace(material, written=Written.of(rows, options.sequence_length))
    return dataclasses.replace(options, sampled_fraction=share), material


def share_of_target(asked: float | None, default: float, material: Material) -> float:
    """Returns the fraction of the sequences that the target wrote: `asked`, or 1 without text.

    If there is text, it is by default the `share` of the data, or `default`.
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
    options: SampledOptions,
    folder: pathlib.Path,
    hashes: dict[str, str],
) -> None:
    """Lets the target continue windows of text into a dataset."""
    o, length = options, options.sequence_length + 1
    # An EOS ends a sequence only if documents are isolated.  Otherwise the target goes on with the
    # next document, as the text does.
    eos = target.eos if o.isolate_documents else ()
    from specjax.proposers import NoProposer

    decoder = decoding.Decoder(target.model, NoProposer(), rules.Match(), eos, length)
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
    """Returns the rows in which a chain of drafts may start; prints how many were skipped."""
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
