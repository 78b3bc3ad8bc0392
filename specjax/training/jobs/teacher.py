"""specjax train teacher: record what a target says about a data set, to train drafts from it.

The target reads every sequence of --data once.  Of each token that follows, its --top likeliest
candidates are written with their log-probabilities, at the sampling settings that it will be served
with.  `train.distill --teacher FOLDER` then needs no target.  With --drafters the hidden states are
written that these kinds of drafters read, for `train.drafter --teacher FOLDER`.  Sequences that the
target writes itself come from train.generate, whose folder is a part of --data.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax._internal.checks import settle
from specjax.files import TOKENIZER
from specjax.models import LinenModel, head_matrix
from specjax.options.command import parse
from specjax.options.fields import count, option
from specjax.parallel import row_parts, to_host
from specjax.training import recorded, tables, targets
from specjax.training.corpus import starts_of_documents
from specjax.training.drafters import KINDS, check_taps, default_taps
from specjax.training.lock import alone
from specjax.training.losses import Teacher, log_target, mapped
from specjax.training.material import Material, TargetDataOptions, gather
from specjax.training.mesh import MeshOptions, lay_batch, mesh_of_sizes, mesh_sizes
from specjax.training.ordering import Rows, numbered
from specjax.training.recorded import Request
from specjax.training.student import read_layers
from specjax.training.targets import ServedOptions, ServingOptions
from specjax.training.top import top_of
from specjax.training.trees import Row, Tree
from specjax.training.written import Written

_HEADS = "medusa"
_MOST = 256 * 10**6
"""Bytes of a file with hidden states, by default."""


@dataclasses.dataclass(frozen=True)
class TeacherOptions(MeshOptions, TargetDataOptions, ServingOptions, ServedOptions):
    """The target, the data, and the recorded arrays."""

    group = "recording"

    out: str = option("runs/teacher", "folder of the recording")
    top: int | None = count(
        None,
        "candidates of each token whose log-probabilities are recorded; by default 64, or none "
        "with --drafters or --taps",
        0,
    )
    drafters: tuple[str, ...] = option(
        (),
        "record the hidden states that drafters of these kinds read by default",
        choices=(*KINDS, _HEADS),
    )
    taps: tuple[int, ...] = option(
        (), "record the last hidden states and the outputs of these layers, too: 0 is the embedding"
    )
    sequence_length: int = count(512, "tokens per sequence")
    sequences: int = count(
        0, "sequences of text; 0: one pass over it.  Sequences with answers are all recorded", 0
    )
    held_out: int = count(128, "most held-out sequences, for evaluations")
    isolate_documents: bool = option(
        False, "tokens do not attend to other documents packed into the same sequence"
    )
    batch_size: int = count(8, "sequences that the target reads at once")
    chunk: int = count(
        0,
        "sequences per file; 0: 64, or fewer if hidden states would make a file of over 256 MB",
        0,
    )
    seed: int = option(0, "seed of the order of the text")

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(
            (
                not self.candidates and not self.has_states,
                "--top 0 records nothing: pass --drafters or --taps, too",
            ),
            (
                self.has_states and self.dtype == "int8",
                "drafters use matrices of the target, which --dtype int8 has rounded: pass float32 "
                "or bfloat16",
            ),
        )

    @property
    def has_states(self) -> bool:
        return bool(self.drafters or self.taps)

    @property
    def candidates(self) -> int:
        """k, the number of candidates of each token."""
        return (0 if self.has_states else 64) if self.top is None else self.top


def sequences(options: TeacherOptions, material: Material) -> tuple[tuple[int, int, int], Rows]:
    """Returns the rows of a recording: of text, with answers, and held out; and their counts.

    Sources with weights take turns until there are as many rows as they have.
    """
    o, length = options, options.sequence_length
    text, written, held_out = material.text, material.written, material.held_out
    nothing = numbered(lambda number: {}, 0)
    parts = [(0, nothing), (0, nothing)]
    if text is not None:
        parts[0] = (o.sequences or text.windows(length), text.rows(length, o.seed))
    if written is not None:
        rows = written.in_order() if written.origin is None else written.rows(o.seed)
        parts[1] = (len(written.tokens), rows)
    if isinstance(held_out, Written):
        parts.append((min(o.held_out, len(held_out.tokens)), held_out.in_order()))
    else:
        parts.append((min(o.held_out, held_out.windows(length)), held_out.rows(length, 0)))
    text_rows, answers, held = (count for count, _ in parts)
    starts = np.cumsum([0, text_rows, answers, held])

    def row(number: int) -> Row:
        part = int(np.searchsorted(starts, number, "right")) - 1
        return parts[part][1][number - int(starts[part])]

    return (text_rows, answers, held), numbered(row, int(starts[-1]))


def main(argv: list[str] | None = None) -> None:
    options = parse(TeacherOptions, argv, __doc__)
    with alone(options.out):
        record(options)


def record(options: TeacherOptions) -> None:
    """Runs the job in a folder that the caller holds."""
    out, mesh = pathlib.Path(options.out), mesh_of_sizes(mesh_sizes(options))
    target = targets.load_target(options, options.dtype, mesh)
    options = targets.fitted(options, target)
    size, config = target.model.vocab_size, target.model.module.config
    if options.candidates > size:
        raise ValueError(f"--top is {options.candidates}; the target has {size} tokens")
    taps = _taps(options, config.num_layers)
    material = gather(options, target, out, options.sequence_length, options.settings)
    assert target.tokenizer is not None  # `gather` has checked it
    end = starts_of_documents(target.tokenizer, options.isolate_documents)
    counts, rows = sequences(options, material)
    request = Request(
        hashes=material.inputs,
        settings=options.settings,
        top=options.candidates,
        dtype=targets.dtype_of(options.dtype),
        isolate_documents=options.isolate_documents,
        length=options.sequence_length,
        chunk=options.chunk or 64,
        vocab_size=size,
        counts=counts,
        share=material.share,
        hidden_size=config.hidden_size if options.has_states else 0,
        taps=taps,
    )
    if not options.chunk and options.has_states:
        most = max(1, min(64, _MOST // request.row_bytes))
        request = dataclasses.replace(request, chunk=most)
    ask = jax.jit(functools.partial(_said, options, targets.reader(target), request, end))
    parts = row_parts(mesh)
    size = -(-options.batch_size // parts) * parts

    def outputs(tokens: np.ndarray) -> recorded.Said:
        found = []
        for first in range(0, len(tokens), size):
            part = tokens[first : first + size]
            # Filled up with its first sequence, so that no other shape is compiled.
            full = np.concatenate([part, np.repeat(part[:1], size - len(part), axis=0)])
            said = to_host(ask(target.params, lay_batch(full, mesh)))
            found.append({name: x[: len(part)] for name, x in said.items()})
        return {name: np.concatenate([one[name] for one in found]) for name in found[0]}

    files = dict(target.files)
    if "tokenizer.json" not in files:
        files["tokenizer.json"] = target.tokenizer.to_str().encode()
    kept = ("config.json", "generation_config.json", *TOKENIZER)
    files = {name: files[name] for name in kept if name in files}
    if options.has_states:
        files[tables.FILE] = tables.packed(target)
    recorded.write(out, request, rows.batch(request.chunk), outputs, files)
    print(f"wrote {out}", flush=True)


def _said(
    options: TeacherOptions,
    network: LinenModel,
    request: Request,
    end: int | None,
    params: Tree,
    tokens: Array,
) -> dict[str, Array]:
    """Returns the target's outputs for tokens [B, T + 1]; see `recorded.Said`."""
    inputs = tokens[:, :-1]
    out = read_layers(network, params, inputs, end, taps=request.taps)
    said: dict[str, Array] = {}
    if request.hidden_size:
        layers = [out.hidden] if out.features is None else [out.hidden, out.features]
        states = jnp.concatenate(layers, axis=-1).astype(jnp.bfloat16)
        said[recorded.STATES] = jax.lax.bitcast_convert_type(states, jnp.uint16)
    if request.top:
        serving = options.serving
        teacher = Teacher(head_matrix(params), network.module.config.logit_softcap)
        hidden = out.hidden.reshape(-1, out.hidden.shape[-1])
        top = mapped(
            lambda part: top_of(log_target(teacher.logits(part), serving), request.top), hidden
        )
        shape = (*inputs.shape, request.top)
        said |= {"top_ids": top.ids.reshape(shape), "top_log_probs": top.log_probs.reshape(shape)}
    return said


def _taps(options: TeacherOptions, layers: int) -> tuple[int, ...]:
    """Returns the layers whose outputs are recorded, ascending."""
    found = set(options.taps)
    for kind in options.drafters:
        found |= set(default_taps(kind, layers) if kind != _HEADS else ())
    check_taps(found, layers)
    return tuple(sorted(found))
