"""Training of draft models and Medusa heads: data, losses, the loop and the optimizer.

The jobs are in `specjax.training.jobs`.
"""
