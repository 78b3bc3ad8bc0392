"""Medusa heads of a target whose logits have a softcap."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from test_train_medusa import job

from specjax.models import LinenModel, Transformer
from specjax.training.jobs import medusa


def test_heads_of_a_target_with_a_softcap():
    """With a cap of 0.5 no log-probability is further than 1 from uniform, so neither is a loss:
    of the heads by hard labels, and of the target beside them."""
    made, params, batch = job(lora_rank=2)
    config = dataclasses.replace(made.target.model.module.config, logit_softcap=0.5)
    model = LinenModel(Transformer(config), made.target.model.dtype)
    target = dataclasses.replace(made.target, model=model)
    heads = medusa.first_adapter(made.options, target)
    capped = medusa.TrainMedusa(made.options, target, made.material, heads)
    found = jax.jit(capped.loss)(params, made.frozen, batch)[1]
    names = [name for name in found if name.startswith("loss_")]
    assert {"loss_head_0", "loss_head_1", "loss_target"} == set(names)
    for name in names:
        assert abs(float(found[name]) - np.log(config.vocab_size)) <= 1, name
    plain = jax.jit(made.loss)(params, made.frozen, batch)[1]
    assert abs(float(plain["loss_target"]) - np.log(config.vocab_size)) > 1, "without a cap"
