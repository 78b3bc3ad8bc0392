"""specjax train medusa: train heads that predict later tokens from a target's hidden states.

The target reads each batch once, and all heads learn from its last hidden states.  It stays frozen
("Medusa-1"), or with --lora-rank it is trained together with the heads ("Medusa-2"), on the data or
(--self-distil) to match its own original distribution.  Medusa-2 writes two folders: the changed
target in `model/target`, and `model/heads`.  Decoding is then lossless relative to that target.

At the end the target writes a few texts greedily.  The ranks that the heads give to these tokens
decide which tree of choices is saved with the heads.

With --teacher the heads learn from the hidden states that train.teacher has recorded, and the tree
is measured on recorded answers, or else on held-out text.
"""

from __future__ import annotations

import dataclasses
import json

import jax
from jax.sharding import Mesh

from specjax.contract import Arrays
from specjax.methods import MedusaAdapter, load_medusa
from specjax.models import LanguageModel
from specjax.options.command import parse, run
from specjax.options.fields import matching
from specjax.training.corpus import starts_of_documents
from specjax.training.jobs.medusa_job import TrainMedusa
from specjax.training.jobs.medusa_options import MedusaOptions
from specjax.training.jobs.medusa_recorded import RecordedMedusa
from specjax.training.lock import alone
from specjax.training.loop import fit
from specjax.training.material import Material, gather
from specjax.training.mesh import mesh_of_run
from specjax.training.recorded import STATES
from specjax.training.recordings import open_teacher, share_of_answers, target_of
from specjax.training.targets import fitted, load_target


def first_adapter(options: MedusaOptions, target: LanguageModel) -> MedusaAdapter:
    """Returns untrained heads, or those of `--initial`.

    Raises:
      ValueError: the heads in `--initial` have another shape or another target.
    """
    made = MedusaAdapter.create(
        target, options.num_heads, num_layers=options.num_layers, own_heads=options.own_heads
    )
    if options.initial is None:
        return made
    loaded = load_medusa(options.initial, target)
    shape = ("num_heads", "num_layers", "own_heads")
    matching(options, loaded.heads, f"--initial {options.initial}", *shape)
    return dataclasses.replace(made, params=loaded.params)


def main(argv: list[str] | None = None) -> None:
    options = parse(MedusaOptions, argv, __doc__)
    with alone(options.out, writes=not options.show_mask):
        job = make_job(options)
        fit(job, job.options)


def make_job(options: MedusaOptions) -> TrainMedusa:
    """Loads and reads what the options name, for `fit` or for a loop of one's own.

    Raises:
      ValueError: options, models and data do not fit together.
    """
    options.check_source()
    mesh = mesh_of_run(options)
    job = _recorded(options, mesh) if options.teacher else _beside_target(options, mesh)
    parts: dict[str, Arrays] = {"heads": job.adapter.params}
    if job.joint:
        parts["lora"] = jax.eval_shape(job.changes)
    counts = {name: sum(x.size for x in jax.tree.leaves(part)) for name, part in parts.items()}
    print(f"parameters: {json.dumps({'target': job.target.num_params, **counts})}", flush=True)
    return job


def _beside_target(options: MedusaOptions, mesh: Mesh | None) -> TrainMedusa:
    """Returns a job whose target is in memory."""
    target = load_target(options, "float32", mesh)
    options = fitted(options, target)
    material = gather(options, target)
    if material.text is not None and material.written is not None:
        raise ValueError(
            "--data holds both text and sequences with answers: heads learn from one kind only"
        )
    assert target.tokenizer is not None
    end = starts_of_documents(target.tokenizer, options.isolate_documents)
    return TrainMedusa(options, target, first_adapter(options, target), material, end, mesh)


def _recorded(options: MedusaOptions, mesh: Mesh | None) -> TrainMedusa:
    """Returns a job that learns from a recording."""
    teacher = open_teacher(options, options.isolate_documents, (STATES,))
    target = target_of(teacher, options, mesh, whole=bool(options.eval_prompts))
    inputs = {**teacher.request.hashes, "teacher": teacher.hash}
    material = Material(None, None, teacher.held_out_rows(), inputs)
    return RecordedMedusa(
        options, target, first_adapter(options, target), material, None, mesh,
        teacher=teacher, share=share_of_answers(None, teacher),
    )  # fmt: skip


if __name__ == "__main__":
    run(main)
