"""The job of `train.distill --teacher`: learning from a target's recorded log-probabilities."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from specjax.contract import Arrays
from specjax.models import LanguageModel, head_matrix
from specjax.parallel import row_parts, to_host
from specjax.training.divergences import DIVERGENCES
from specjax.training.jobs.distill_job import ROWS, Batch, Distill, filled
from specjax.training.jobs.distill_options import AUTO, DistillOptions
from specjax.training.losses import (
    against_recorded,
    chunked,
    chunked_rows,
    recorded_agreement,
    with_cap,
)
from specjax.training.material import learned
from specjax.training.mesh import lay_batch
from specjax.training.recorded import Recorded
from specjax.training.recordings import open_teacher, share_of_answers, target_of
from specjax.training.student import read


@dataclasses.dataclass(eq=False)
class DistillRecorded(Distill):
    """Trains a draft by a divergence from the log-probabilities of a recording."""

    teacher: Recorded = dataclasses.field(kw_only=True)

    @property
    def frozen(self) -> Arrays:
        return {}

    def batch(self, step: int) -> dict[str, np.ndarray]:
        o, made = self.options, self.teacher.batch(self.options, step)
        made["top_ids"], made["top_log_probs"] = (
            made[name][:, :, : o.top] for name in ("top_ids", "top_log_probs")
        )
        share = min(1.0, step / o.anneal_steps) if o.anneal_steps else 1.0
        return {**made, "share": np.full(o.batch_size, share, np.float32)}

    def loss(self, params: Arrays, frozen: Arrays, batch: Batch) -> tuple[Array, dict[str, Array]]:
        o = self.options
        weight = learned(batch["drawn"], o.learn_prompts).reshape(-1)
        hidden = read(self.draft, params, batch["tokens"][:, :-1], self.end)
        total = chunked(with_cap(against_recorded(DIVERGENCES[o.loss]), self.cap))(
            hidden, head_matrix(params), (weight, *_flat(batch)), (self.serving, self._share(batch))
        )
        return total / weight.sum().clip(1), {"weight": weight.sum()}

    @functools.cached_property
    def _bounds(self) -> Callable[..., Array]:
        def mean(params: Arrays, batch: Batch) -> Array:
            weight = learned(batch["drawn"], self.options.learn_prompts) * batch["counted"][:, None]
            hidden = read(self.draft, params, batch["tokens"][:, :-1], self.end)
            values = chunked_rows(with_cap(recorded_agreement, self.cap))(
                hidden, head_matrix(params), _flat(batch), (self.serving,)
            )
            return (weight.reshape(-1, 1) * values).sum(0) / weight.sum()

        return jax.jit(mean)

    def evaluate(self, params: Arrays) -> dict[str, float]:
        means = []
        for index in range(self.options.eval_batches):
            batch = self.teacher.held_out(index * ROWS, ROWS)
            batch["counted"] = np.ones(ROWS, np.float32)
            # Padding rows have weight 0, so every mesh measures the same text.
            batch = lay_batch(filled(batch, row_parts(self.mesh)), self.mesh)
            means.append(to_host(self._bounds(params, batch)))
        names = ("kl_at_least", "alpha_at_least", "alpha_at_most", "same_argmax")
        values = np.mean(means, axis=0).tolist()
        report = {f"held_out_{name}": value for name, value in zip(names, values, strict=True)}
        return report | self._tau(params)

    def goal(self, report: dict[str, float]) -> float:
        return report.get("tau", -report["held_out_kl_at_least"])


def _flat(batch: Batch) -> tuple[Array, Array]:
    """Returns the recorded ids and log-probabilities [B * T, k]."""
    ids, log_probs = batch["top_ids"], batch["top_log_probs"]
    return ids.reshape(-1, ids.shape[-1]), log_probs.reshape(-1, ids.shape[-1])


def taught(
    options: DistillOptions, mesh: Mesh | None
) -> tuple[DistillOptions, LanguageModel, Recorded]:
    """Returns the recording that a run learns from.

    Returns:
      The options with the fields that the recording decides, the target (without parameters, unless
      tau is measured with it), and the recording.

    Raises:
      ValueError: the recording is damaged or not complete, another target made it, or it was made
        for other options.
    """
    teacher = open_teacher(
        options, options.isolate_documents, dtype=options.dtype, settings=options.settings
    )
    request = teacher.request
    if options.top > request.top:
        raise ValueError(
            f"--top is {options.top}; --teacher {options.teacher} has {request.top} "
            "log-probabilities of each token: pass no more, or record it again"
        )
    options = dataclasses.replace(
        options,
        top=options.top or request.top,
        sampled_fraction=share_of_answers(options.sampled_fraction, teacher),
    )
    whole = bool(options.eval_prompts) or options.loss == AUTO
    return options, target_of(teacher, options, mesh, whole), teacher
