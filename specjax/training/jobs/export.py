"""specjax train export: convert a draft or Medusa heads for an engine, or heads for specjax.

    --format hf              a draft, with the files that transformers, vLLM, SGLang and
                             TensorRT-LLM expect beside it
    --format vllm, tgi, ...  Medusa heads
    --format specjax         Medusa heads of another --source-format, for specjax

Numbers are copied bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
import safetensors

from specjax._internal.checks import settle
from specjax.files import SINGLE, find_folder, load, save, weight_files
from specjax.methods import (
    HEAD_FORMATS,
    HeadTensors,
    MedusaAdapter,
    MedusaHeads,
    read_heads,
    write_heads,
)
from specjax.models import LanguageModel, head_matrix
from specjax.options.command import parse
from specjax.options.fields import REQUIRED, Options, option
from specjax.text import vocabulary_digest
from specjax.training.record import versions

_DRAFT, _MARK = "hf", "export.json"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclasses.dataclass(frozen=True)
class ExportOptions(Options):
    """The input, the output, and their formats."""

    group = "export"

    model: str = option(REQUIRED, "folder of a draft, or of Medusa heads")
    format: str = option(REQUIRED, "output format", choices=(_DRAFT, *HEAD_FORMATS))
    out: str = option(REQUIRED, "a new folder, or one that an earlier export wrote")
    source_format: str = option(
        "specjax", "format of the folder of Medusa heads", choices=tuple(HEAD_FORMATS)
    )
    target: str | None = option(
        None, "folder of the target; needed for heads, and used to check a draft's vocabulary"
    )
    base: str | None = option(
        None, "name of the target of the heads; by default the name in their folder"
    )

    def __post_init__(self):
        super().__post_init__()
        out = pathlib.Path(self.out)
        others = out.exists() and not (out / _MARK).exists()
        settle(
            (
                self.format == _DRAFT and self.source_format != "specjax",
                f"--source-format {self.source_format} is for Medusa heads, and --format {_DRAFT} "
                "for drafts",
            ),
            (
                self.format in HEAD_FORMATS and self.target is None,
                "--target is missing: heads are checked against it, and some formats include its "
                "linear map to the vocabulary",
            ),
            (
                self.format in (_DRAFT, "vllm") and "eagle" in self.out.lower(),
                f"--out {self.out}: vLLM takes a folder with 'eagle' in its path for EAGLE; choose "
                "another name",
            ),
            (
                others and (not out.is_dir() or any(out.iterdir())),
                f"--out {self.out} has contents that no export wrote; choose a new folder",
            ),
        )


def export_draft(options: ExportOptions) -> None:
    """Writes a draft as a Hugging Face folder."""
    folder = find_folder(options.model)
    kinds = set()
    for file in weight_files(folder):
        with safetensors.safe_open(file, "np") as handle:
            kinds |= {handle.get_slice(name).get_dtype() for name in handle.keys()}
    # A folder of several types is stored as float32, which holds all of them exactly.
    draft = load(folder, _DTYPES.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32")
    if draft.tokenizer is None:
        raise ValueError(
            f"--model {options.model} has no tokenizer.json; put the target's beside the weights"
        )
    if options.target is not None:
        check_vocabulary(draft, load(options.target, "float32"))
    save(draft, options.out)


def check_vocabulary(draft: LanguageModel, target: LanguageModel) -> None:
    """Checks that the draft has the target's tokens; prints a note if its context is shorter."""
    assert draft.tokenizer is not None
    words = target.tokenizer or draft.tokenizer
    other_size = draft.model.vocab_size != target.model.vocab_size
    settle(
        (
            other_size,
            f"the draft {draft.name!r} has {draft.model.vocab_size} tokens and the target "
            f"{target.name!r} {target.model.vocab_size}; engines need equal numbers: train the "
            "draft with the target's vocabulary",
        ),
        (
            not other_size and vocabulary_digest(draft.tokenizer) != vocabulary_digest(words),
            f"the draft {draft.name!r} has other tokens than the target {target.name!r}, and vLLM "
            "and TensorRT-LLM would feed it the target's: train a draft with the target's "
            "tokenizer",
        ),
    )
    if draft.model.max_positions < target.model.max_positions:
        print(
            f"note: the draft reads {draft.model.max_positions} positions and the target "
            f"{target.model.max_positions}; vLLM serves the smaller number",
            flush=True,
        )


def export_heads(options: ExportOptions) -> None:
    """Writes Medusa heads in another format.

    Raises:
      ValueError: the heads belong to another target, or the format cannot represent them.
    """
    assert options.target is not None
    target = load(options.target, "float32", dequantise=True)
    matrix = np.asarray(head_matrix(target.params)).T
    heads = read_heads(pathlib.Path(options.model), options.source_format, matrix)
    _check_marks(heads, target, pathlib.Path(options.model).name)
    base = options.base or heads.form.base or target.name
    heads = dataclasses.replace(heads, form=dataclasses.replace(heads.form, base=base))
    write_heads(pathlib.Path(options.out), options.format, heads, matrix)


def _check_marks(heads: HeadTensors, target: LanguageModel, name: str) -> None:
    """Raises ValueError for heads that specjax trained for another target of the same shape."""
    vocab, size = target.model.vocab_size, head_matrix(target.params).shape[0]
    marks = tuple(map(float, heads.form.ours.get("target", ())))
    form = MedusaHeads(heads.form.num_heads, size, vocab)
    MedusaAdapter(name=name, heads=form, marks=marks).check(target)


def main(argv: list[str] | None = None) -> None:
    options = parse(ExportOptions, argv, __doc__)
    out = pathlib.Path(options.out)
    if out.resolve() == pathlib.Path(options.model).resolve():
        raise ValueError(f"--out {options.out} is the folder that is read; choose another one")
    (export_draft if options.format == _DRAFT else export_heads)(options)
    written = SINGLE if options.format == _DRAFT else HEAD_FORMATS[options.format].file
    for file in {row.file for row in HEAD_FORMATS.values()} - {written}:
        # Weights of an earlier export: engines would read them too.
        (out / file).unlink(missing_ok=True)
    facts = {"options": dataclasses.asdict(options), "versions": versions()}
    (out / _MARK).write_text(json.dumps(facts, indent=2) + "\n")
    print(
        f"{options.format}: {', '.join(sorted(path.name for path in out.iterdir()))} in {out}",
        flush=True,
    )
