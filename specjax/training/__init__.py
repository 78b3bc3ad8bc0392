"""Training of draft models and heads: data, losses, the loop and the optimizer.

The jobs are in `specjax.training.jobs`, and `python -m train.JOB` and `specjax train JOB` run them.
In a program of one's own, a job is made from its options.  It has the data, the loss, the
evaluation and the export; `fit` runs it, or a loop of one's own:

    job = distillation(DistillOptions(target="...", data=("...",)))
    batch = job.batch(0)
    loss, metrics = job.loss(job.init(), job.frozen, batch)
"""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.training.jobs.distill import DistillOptions
    from specjax.training.jobs.distill import make_job as distillation
    from specjax.training.jobs.drafter import DrafterOptions
    from specjax.training.jobs.drafter import make_job as drafter_training
    from specjax.training.jobs.medusa import MedusaOptions
    from specjax.training.jobs.medusa import make_job as medusa_training
    from specjax.training.jobs.pretrain import PretrainOptions
    from specjax.training.jobs.pretrain import make_job as pretraining
    from specjax.training.loop import Job, LoopOptions, fit
    from specjax.training.optimizer import make_optimizer, make_schedule

__getattr__ = lazily(__name__, __file__)

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
