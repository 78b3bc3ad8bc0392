"""Training of draft models and heads: data, losses, the loop and the optimizer.

The jobs are in `specjax.training.jobs`, and `python -m train.JOB` and `specjax train JOB` run them.
In a program of one's own, a job is made from its options.  It has the data, the loss, the
evaluation and the export; `fit` runs it, or a loop of one's own:

    job = distillation(DistillOptions(target="...", data=("...",)))
    batch = job.batch(0)
    loss, metrics = job.loss(job.init(), job.frozen, batch)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.training.jobs.distill import make_job as distillation
    from specjax.training.jobs.distill_options import DistillOptions
    from specjax.training.jobs.drafter import make_job as drafter_training
    from specjax.training.jobs.drafter_options import DrafterOptions
    from specjax.training.jobs.medusa import make_job as medusa_training
    from specjax.training.jobs.medusa_options import MedusaOptions
    from specjax.training.jobs.pretrain import PretrainOptions
    from specjax.training.jobs.pretrain import make_job as pretraining
    from specjax.training.loop import Job, fit
    from specjax.training.loop_options import LoopOptions
    from specjax.training.optimizer import make_optimizer, make_schedule

_HOMES = {
    "DistillOptions": ("jobs.distill_options", "DistillOptions"),
    "DrafterOptions": ("jobs.drafter_options", "DrafterOptions"),
    "Job": ("loop", "Job"),
    "LoopOptions": ("loop_options", "LoopOptions"),
    "MedusaOptions": ("jobs.medusa_options", "MedusaOptions"),
    "PretrainOptions": ("jobs.pretrain", "PretrainOptions"),
    "distillation": ("jobs.distill", "make_job"),
    "drafter_training": ("jobs.drafter", "make_job"),
    "fit": ("loop", "fit"),
    "make_optimizer": ("optimizer", "make_optimizer"),
    "make_schedule": ("optimizer", "make_schedule"),
    "medusa_training": ("jobs.medusa", "make_job"),
    "pretraining": ("jobs.pretrain", "make_job"),
}
"""Where each name is: a job is imported when it is asked for, and the others are not."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)


__all__ = [
    "DistillOptions",
    "DrafterOptions",
    "Job",
    "LoopOptions",
    "MedusaOptions",
    "PretrainOptions",
    "distillation",
    "drafter_training",
    "fit",
    "make_optimizer",
    "make_schedule",
    "medusa_training",
    "pretraining",
]
