"""Training: data, losses, the loop and the optimizer of drafts and heads; its jobs are in `specjax.training.jobs`."""
