"""What the jobs share that train a draft for a target: its data, held-out prompts, and tau."""

from __future__ import annotations

import dataclasses
import json
from typing import Generic, TypeVar

import numpy as np
import tokenizers
from jax.sharding import Mesh

from specjax import contract
from specjax.models import LanguageModel
from specjax.training.dataset import initial_hash
from specjax.training.material import Material, held_out_prompts, learned
from specjax.training.record import named
from specjax.training.recordings import TaughtOptions
from specjax.training.trees import Row, Tree
from specjax.types import Json, Params

OptionsT = TypeVar("OptionsT", bound=TaughtOptions)


@dataclasses.dataclass(eq=False)
class TaughtJob(Generic[OptionsT]):
    """A job with a frozen target.

    Attributes:
      options: of the run.
      target: its parameters are those of the recording if there is one and nothing is measured.
      material: the data.
      mesh: of the run; None: one device.
    """

    options: OptionsT
    target: LanguageModel
    material: Material
    mesh: Mesh | None = dataclasses.field(default=None, kw_only=True)

    @property
    def frozen(self) -> Tree:
        return self.target.params

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        assert self.target.tokenizer is not None  # the data was read with it
        return self.target.tokenizer

    @property
    def initial(self) -> str | None:
        """The folder of the weights that the run starts from."""
        return getattr(self.options, "initial", None)

    @property
    def models(self) -> dict[str, dict[str, Json]]:
        """The models of the run by their names in `run.json`."""
        config = self.target.model.module.config
        return {"target": named(self.options.words, config, self.target.num_params)}

    @property
    def facts(self) -> dict[str, Json]:
        return {"models": self.models}

    def say_sizes(self, note: str = "", **more: int) -> None:
        """Prints the number of parameters of each model, and `more` numbers."""
        sizes = {name: model["parameters"] for name, model in self.models.items()} | more
        sizes = {name: size for name, size in sizes.items() if size}
        print(f"parameters: {json.dumps(sizes)}{note}", flush=True)

    @property
    def inputs(self) -> dict[str, str]:
        return {**self.material.inputs, **initial_hash(self.initial)}

    def show(self, batch: Row) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens, and which of them are learned, for --show-mask."""
        if self.options.online:
            raise ValueError("--show-mask: with --online the tokens are written during the step")
        mask = learned(batch["drawn"], self.options.learn_prompts)
        return batch["tokens"], np.asarray(mask)

    def prompts(self, count: int, longest: int) -> list[list[int]]:
        """Returns held-out prompts of at most `longest` tokens."""
        o = self.options
        prompt = getattr(o, o.prompt)
        held_out = self.material.held_out
        return held_out_prompts(held_out, count, o.sequence_length, prompt, longest)

    def tau(
        self, proposer: contract.Proposer, params: Params, settings: dict[str, float]
    ) -> dict[str, float]:
        """Returns tau on held-out prompts with the decoder, if --eval-prompts asks for it.

        These are the tokens per pass of the target, and their interval tau_low, tau_high if there
        are several prompts.
        """
        o = self.options
        if not o.eval_prompts:
            return {}
        from specjax import decoding, measure, rules

        prompts = self.prompts(o.eval_prompts, o.sequence_length - o.eval_tokens)
        room = max(map(len, prompts)) + o.eval_tokens + proposer.num_nodes
        decoder = decoding.Decoder(
            self.target.model, proposer, rules.Match(), self.target.eos, room
        )
        rows = min(len(prompts), 8)
        counts = measure.measure(
            decoder, params, prompts, o.eval_tokens, batch=rows, settings=settings, seed=0
        ).counts
        found = measure.interval(counts.emitted, counts.passes)
        assert found is not None
        tau, low, high = found
        return {"tau": tau} | ({"tau_low": low, "tau_high": high} if len(prompts) > 1 else {})
