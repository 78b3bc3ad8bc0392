"""specjax train distill: train a small draft to predict what the target would write.

The draft learns from windows of text, from text that the target wrote, from text that it writes
itself, or inside speculation (--online).  Text that the models wrote matches where a draft is used;
plain text keeps the data varied.  With --teacher it learns from what train.teacher has recorded,
and no target is needed.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
from jax.sharding import Mesh

from specjax.contract import Arrays
from specjax.models import LanguageModel
from specjax.options.command import parse, run
from specjax.training import dataset
from specjax.training.corpus import starts_of_documents
from specjax.training.dataset import initial_hash, model_hashes
from specjax.training.jobs.distill_job import Distill
from specjax.training.jobs.distill_options import (
    ACCEPTED_LENGTH,
    AUTO,
    DistillOptions,
    annealing,
)
from specjax.training.lock import alone
from specjax.training.loop import fit
from specjax.training.material import gather
from specjax.training.mesh import mesh_of_run
from specjax.training.record import named
from specjax.training.sources import sample, share_of_target, with_starts
from specjax.training.student import check_initial, make_model, no_wider
from specjax.training.targets import fitted, load_target
from specjax.training.written import Written


def main(argv: list[str] | None = None) -> None:
    options = parse(DistillOptions, argv, __doc__)
    with alone(options.out, writes=not options.show_mask):
        distill(options)


def distill(options: DistillOptions) -> None:
    """Runs the job in a folder that the caller holds."""
    job = make_job(options)
    if options.loss == AUTO:
        if options.show_mask:
            raise ValueError("--show-mask shows the batches of one loss: name it, not --loss auto")
        from specjax.training.jobs.calibration import calibrated

        job = calibrated(job)
    if job.options.anneal_steps:
        print(
            f"the loss changes from forward KL to --loss {job.options.loss} in the first "
            f"{job.options.anneal_steps} steps (--anneal-steps)",
            flush=True,
        )
    fit(job, job.options)


def make_job(options: DistillOptions) -> Distill:
    """Loads and reads the models and data that the options name.

    Returns:
      The job, for `fit` or for a loop of one's own; `job.options` has the defaults filled in.

    Raises:
      ValueError: options, models and data do not fit together.
    """
    options.check_source()
    if options.loss != AUTO:
        options = dataclasses.replace(options, anneal_steps=annealing(options))
    mesh = mesh_of_run(options)
    return _recorded(options, mesh) if options.teacher else _beside_target(options, mesh)


def _beside_target(options: DistillOptions, mesh: Mesh | None) -> Distill:
    """Returns a job whose target is in memory."""
    out = pathlib.Path(options.out)
    target = load_target(options, options.dtype, mesh)
    options = no_wider(fitted(options, target), target.model.module.config)
    _check_start(options, target)
    material = gather(options, target, options.settings, options.loss == ACCEPTED_LENGTH)
    text, written = material.text, material.written
    share = share_of_target(options.sampled_fraction, options.share_beside_text, material)
    options = dataclasses.replace(options, sampled_fraction=share)
    needs_text = options.online or share < 1
    if needs_text and text is None:
        cure = "" if options.online else ", or pass --sampled-fraction 1"
        raise ValueError(
            "--data holds only sequences of prompts and answers"
            + ", and --online continues windows of text" * options.online
            + f": add a folder of text{cure}"
        )
    samples = bool(share) and not options.online
    if written is None and text is not None and samples:
        hashes = model_hashes(options.target, options.lora)
        sample(target, text, options, out / "sampled", hashes)
        rows = dataset.read_masked(out / "sampled", hashes)
        written = Written.of(rows, options.sequence_length)
    if written is not None and options.loss == ACCEPTED_LENGTH:
        written = with_starts(written, options.num_drafts)
    if options.pack:
        if written is None:
            raise ValueError("--pack: there are no sequences with answers to pack; leave it out")
        written = written.packed()
    draft = make_model(options, target.model.vocab_size, target.model.max_positions)
    trained = None
    if options.early_exit is not None:
        from specjax.training.early_exit import exit_of

        draft, trained = exit_of(draft, target, options.early_exit)
    assert target.tokenizer is not None  # `gather` has checked it
    end = starts_of_documents(target.tokenizer, options.isolate_documents)
    inputs = {**material.inputs, **_start_hash(options)}
    job = Distill(
        options, draft, target, text, material.held_out, written, end, inputs, mesh, trained
    )
    return _with_models(job, options.target)


def _recorded(options: DistillOptions, mesh: Mesh | None) -> Distill:
    """Returns a job that learns from a recording."""
    from specjax.training.jobs.distill_recorded import DistillRecorded, taught

    options, target, teacher = taught(options, mesh)
    options = no_wider(options, target.model.module.config)
    _check_start(options, target)
    draft = make_model(options, target.model.vocab_size, target.model.max_positions)
    assert target.tokenizer is not None  # `taught` has checked it
    end = starts_of_documents(target.tokenizer, options.isolate_documents)
    inputs = {**teacher.request.hashes, "teacher": teacher.hash, **_start_hash(options)}
    rows = teacher.held_out_rows()
    job = DistillRecorded(
        options, draft, target, None, rows, None, end, inputs, mesh, teacher=teacher
    )
    return _with_models(job, options.teacher or "")


def _check_start(options: DistillOptions, target: LanguageModel) -> None:
    """Checks the tokens of a model that the draft starts from."""
    start = options.start
    # The target's own layers have its tokens, also if a LoRA brings a tokenizer.
    foreign = None if start is None or start.folder == options.target else start
    check_initial(
        foreign, target.tokenizer, target.model.vocab_size, f"--target {options.words}",
        "a draft must share the target's tokens: pass one that was trained for this target",
        "--teacher" if options.teacher else "--draft-fraction" if options.draft_fraction else "",
    )  # fmt: skip


def _start_hash(options: DistillOptions) -> dict[str, str]:
    start = options.start
    return initial_hash(start.folder if start is not None and start.has_weights else None)


def _with_models(job: Distill, teacher: str) -> Distill:
    """Returns the job with its models in `run.json`; their sizes are printed."""
    shapes, start = jax.eval_shape(job.draft.init, jax.random.key(0)), job.options.start
    models = {
        "target": named(teacher, job.target.model.module.config, job.target.num_params),
        "draft": named(start and start.folder, job.draft.module.config, shapes),
    }
    sizes = {"target": job.target.num_params, "draft": models["draft"]["parameters"]}
    if job.trained:
        sizes["trained"] = _count({name: shapes[name] for name in job.trained})
    sizes = {name: size for name, size in sizes.items() if size}
    print(f"parameters: {json.dumps(sizes)}", flush=True)
    return job.with_options(job.options, {"models": models})


def _count(shapes: Arrays) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


if __name__ == "__main__":
    run(main)
