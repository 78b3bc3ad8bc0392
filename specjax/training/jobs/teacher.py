"""python -m train.teacher: record what a target says about a data set, to train drafts from it.

The target reads every sequence of --data once.  Of each token that follows, its --top likeliest
candidates are written with their log-probabilities, at the sampling settings that it will be served
with.  `train.distill --teacher FOLDER` then needs no target.  Sequences that the target writes
itself come from train.generate, whose folder is a part of --data.
"""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import numpy as np
from jax import Array

from specjax.contract import Arrays
from specjax.files import TOKENIZER
from specjax.models import head_matrix
from specjax.parallel import row_parts, to_host
from specjax.sampling import Sampling
from specjax.training import recorded
from specjax.training.corpus import TextOptions, Tokens, starts_of_documents
from specjax.training.lock import alone
from specjax.training.losses import Teacher, log_target, mapped
from specjax.training.material import Material, gather
from specjax.training.mesh import MeshOptions, lay_batch, mesh_of_sizes, mesh_sizes
from specjax.training.mixture import Mixture
from specjax.training.options import at_least, option, parse, run
from specjax.training.recorded import Request
from specjax.training.student import read
from specjax.training.targets import ServedOptions, dtype_of, load_target, reader
from specjax.training.top import top_of
from specjax.training.written import Written


@dataclasses.dataclass(frozen=True)
class TeacherOptions(MeshOptions, TextOptions, ServedOptions):
    """The target, the data, and what is recorded."""

    out: str = option("runs/teacher", "folder of the recording")
    top: int = option(64, "candidates of each token whose log-probabilities are recorded")
    sequence_length: int = option(512, "tokens per sequence")
    sequences: int = option(
        0, "sequences of text; 0: one pass over it.  Sequences with answers are all recorded"
    )
    held_out: int = option(128, "most held-out sequences, for evaluations")
    temperature: float = option(1.0, "temperature that the target will be served with")
    top_k: int = option(0, "top-k that the target will be served with; 0: off")
    top_p: float = option(1.0, "top-p that the target will be served with; 1: off")
    isolate_documents: bool = option(
        False, "tokens do not attend to other documents packed into the same sequence"
    )
    batch_size: int = option(8, "sequences that the target reads at once")
    chunk: int = option(64, "sequences per file")
    seed: int = option(0, "seed of the order of the text")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "top", "sequence_length", "held_out", "batch_size", "chunk")
        at_least(self, 0, "sequences")
        Sampling.create(1, **self.settings)

    @property
    def settings(self) -> dict[str, float]:
        """The settings that the target is served with, as `Sampling.create` takes them."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    @property
    def weights(self) -> tuple[float, ...]:
        """All texts are one stream."""
        return ()


@dataclasses.dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of a recording in order: of text, with answers, and held out."""

    options: TeacherOptions
    material: Material

    @property
    def counts(self) -> tuple[int, int, int]:
        o, text, written = self.options, self.material.text, self.material.written
        windows = 0 if text is None else o.sequences or text.windows(o.sequence_length)
        answers = 0 if written is None else len(written.tokens)
        held_out = self.material.held_out
        most = (
            held_out.windows(o.sequence_length)
            if isinstance(held_out, Tokens | Mixture)
            else len(held_out.tokens)
        )
        return windows, answers, min(o.held_out, most)

    def rows(self, numbers: range) -> Written:
        """The sequences of these numbers."""
        windows, answers, _ = self.counts
        made = [self._row(number, windows, answers) for number in numbers]
        tokens, drawn, limit = (
            np.concatenate(x)
            for x in zip(*((row.tokens, row.drawn, row.limit) for row in made), strict=True)
        )
        return Written(tokens, drawn, limit)

    def _row(self, number: int, windows: int, answers: int) -> Written:
        material = self.material
        if number < windows:
            assert material.text is not None
            return self._text(material.text, number, self.options.seed)
        if number < windows + answers:
            assert material.written is not None
            return material.written.at(np.array([number - windows]))
        number -= windows + answers
        if isinstance(material.held_out, Tokens | Mixture):
            return self._text(material.held_out, number, 0)
        return material.held_out.at(np.array([number]))

    def _text(self, text: Tokens | Mixture, number: int, seed: int) -> Written:
        length = self.options.sequence_length
        drawn, limit = np.zeros((1, length), np.float32), np.full(1, length, np.int32)
        return Written(text.rows(number, 1, length, seed), drawn, limit)


def main(argv: list[str] | None = None) -> None:
    options = parse(TeacherOptions, argv, __doc__)
    with alone(options.out):
        record(options)


def record(options: TeacherOptions) -> None:
    """Run the job in a folder that the caller holds."""
    out, mesh = pathlib.Path(options.out), mesh_of_sizes(mesh_sizes(options))
    target = load_target(options, options.dtype, mesh)
    size = target.model.vocab_size
    if options.top > size:
        raise ValueError(f"--top is {options.top}; the target has {size} tokens")
    material = gather(options, target, options.settings)
    assert target.tokenizer is not None  # `gather` has checked it
    end = starts_of_documents(target.tokenizer, options.isolate_documents)
    sequences = Sequences(options, material)
    request = Request(
        hashes=material.inputs,
        settings=options.settings,
        top=options.top,
        dtype=dtype_of(options.dtype),
        isolate_documents=options.isolate_documents,
        length=options.sequence_length,
        chunk=options.chunk,
        vocab_size=size,
        counts=sequences.counts,
    )
    plain = options.settings == {"temperature": 1, "top_k": 0, "top_p": 1}
    serving = None if plain else Sampling.create(1, **options.settings)
    network = reader(target)
    cap = target.model.module.config.logit_softcap

    def said(params: Arrays, tokens: Array) -> tuple[Array, Array]:
        """Ids and log-probabilities [B * T, k]."""
        teacher = Teacher(head_matrix(params), cap)
        hidden = read(network, params, tokens[:, :-1], end)
        top = mapped(lambda h: top_of(log_target(teacher.logits(h), serving), options.top), hidden)
        return top.ids, top.log_probs

    ask = jax.jit(said)
    parts = row_parts(mesh)
    rows = -(-options.batch_size // parts) * parts

    def outputs(tokens: np.ndarray) -> recorded.Outputs:
        found = []
        for first in range(0, len(tokens), rows):
            part = tokens[first : first + rows]
            # Filled up with its first sequence, so that no other shape is compiled.
            full = np.concatenate([part, np.repeat(part[:1], rows - len(part), axis=0)])
            ids, log_probs = to_host(ask(target.params, lay_batch(full, mesh)))
            shape = (rows, tokens.shape[1] - 1, options.top)
            found.append([x.reshape(shape)[: len(part)] for x in (ids, log_probs)])
        ids, log_probs = (np.concatenate(x) for x in zip(*found, strict=True))
        return ids, log_probs

    files = dict(target.files)
    if "tokenizer.json" not in files:
        files["tokenizer.json"] = target.tokenizer.to_str().encode()
    kept = ("config.json", "generation_config.json", *TOKENIZER)
    files = {name: files[name] for name in kept if name in files}
    recorded.write(out, request, lambda n: sequences.rows(request.rows(n)), outputs, files)
    print(f"wrote {out}", flush=True)


if __name__ == "__main__":
    run(main)
