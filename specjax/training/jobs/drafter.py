"""specjax train drafter: train a drafter that reads hidden states of its target.

--kind eagle3, peagle, dflash or dspark.  The target reads each batch once and stays frozen.  The
drafter learns from its hidden states at a few layers to predict what the target would say, from
many positions of every text at once.  With --teacher it learns from the hidden states that
train.teacher has recorded, and only the target's embedding and output matrix are in memory.
(`--kind model` and `--kind medusa` are train.distill and train.medusa.)

The exported folder is one that specjax.load_drafter reads, and the method's own tools, too.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import jax
from jax.sharding import Mesh

from specjax.options.command import parse, run
from specjax.training import dataset
from specjax.training.dataset import model_hashes
from specjax.training.drafters import draft_vocabulary, mask_token, plan, token_counts
from specjax.training.jobs import distill, medusa
from specjax.training.jobs.drafter_job import TrainDrafter
from specjax.training.jobs.drafter_options import DrafterOptions
from specjax.training.jobs.drafter_recorded import RecordedDrafter
from specjax.training.lock import alone
from specjax.training.loop import fit
from specjax.training.material import Material, gather
from specjax.training.mesh import mesh_of_run
from specjax.training.recorded import STATES
from specjax.training.recordings import open_teacher, share_of_answers, target_of
from specjax.training.sources import sample, share_of_target
from specjax.training.targets import fitted, load_target
from specjax.training.written import Written

FRONT_DOORS = {"model": distill.main, "medusa": medusa.main}
"""Kinds that have a job of their own."""


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    other = [kind for kind in FRONT_DOORS if arguments[:2] == ["--kind", kind]]
    if other:
        FRONT_DOORS[other[0]](arguments[2:])
        return
    options = parse(DrafterOptions, argv, __doc__)
    with alone(options.out, writes=not options.show_mask):
        job = make_job(options)
        fit(job, job.options)


def make_job(options: DrafterOptions) -> TrainDrafter:
    """Loads and reads what the options name, for `fit` or for a loop of one's own.

    Returns:
      The job; `job.options` has the defaults filled in.

    Raises:
      ValueError: options, models and data do not fit together.
    """
    options.check_source()
    if options.keep_features and jax.process_count() > 1:
        raise ValueError("--keep-features works in a single process: leave it out")
    mesh = mesh_of_run(options)
    job = _recorded(options, mesh) if options.teacher else _beside_target(options, mesh)
    counts = {
        "target": job.target.num_params,
        "drafter": sum(x.size for x in jax.tree.leaves(jax.eval_shape(job.fresh))),
    }
    print(f"parameters: {json.dumps(counts)}; taps {job.learner.source.taps}", flush=True)
    if job.features is not None:
        print(job.features, flush=True)
    return job


def _beside_target(options: DrafterOptions, mesh: Mesh | None) -> TrainDrafter:
    """Returns a job whose target is in memory."""
    target = load_target(options, options.dtype, mesh)
    options = fitted(options, target)
    material = gather(options, target, options.settings)
    if options.online and material.text is None:
        raise ValueError(
            "--data holds only sequences of prompts and answers, and --online continues windows of "
            "text: add a folder of text"
        )
    default = 0.0 if options.online or material.written is None else 0.5
    share = share_of_target(options.sampled_fraction, default, material)
    config, known = target.model.module.config, None
    learner = plan(options.kind, options, config, mask_token(target, options.mask_token))
    if options.draft_vocab_size:
        counts = token_counts(material, config.vocab_size)
        known = draft_vocabulary(counts, options.draft_vocab_size, target.eos)
    written = material.written
    if share and written is None and material.text is not None:
        hashes = model_hashes(options.target, options.lora)
        folder = pathlib.Path(options.out) / "sampled"
        sample(target, material.text, options, folder, hashes)
        rows = dataset.read_masked(folder, hashes)
        written = Written.of(rows, options.sequence_length)
    share = 1.0 if material.text is None else share
    options = dataclasses.replace(options, sampled_fraction=share)
    return TrainDrafter(options, target, learner, material, written, known, mesh)


def _recorded(options: DrafterOptions, mesh: Mesh | None) -> TrainDrafter:
    """Returns a job that learns from a recording."""
    teacher = open_teacher(options, options.isolate_documents, (STATES,), options.dtype)
    share = share_of_answers(options.sampled_fraction, teacher)
    options = dataclasses.replace(options, sampled_fraction=share)
    target = target_of(teacher, options, mesh, whole=bool(options.eval_prompts))
    config, known = target.model.module.config, None
    learner = plan(options.kind, options, config, mask_token(target, options.mask_token))
    teacher = teacher.tapping(learner.source.taps)
    if options.draft_vocab_size:
        counts = teacher.token_counts()
        known = draft_vocabulary(counts, options.draft_vocab_size, target.eos)
    inputs = {**teacher.request.hashes, "teacher": teacher.hash}
    material = Material(None, None, teacher.held_out_rows(), inputs)
    return RecordedDrafter(
        options, target, learner, material, None, known, mesh, teacher=teacher
    )  # fmt: skip


if __name__ == "__main__":
    run(main)
