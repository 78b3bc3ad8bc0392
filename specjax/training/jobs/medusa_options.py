"""The options of `train.medusa`."""

from __future__ import annotations

import dataclasses

from specjax.options.fields import above, at_least, option, within
from specjax.training.mixture import WeightOptions
from specjax.training.recordings import TaughtOptions


@dataclasses.dataclass(frozen=True)
class MedusaOptions(TaughtOptions, WeightOptions):
    """The target, the data, the shape of the heads, and the loop."""

    group = "heads"
    common = (
        "target", "data", "teacher", "mesh", "steps", "batch_size", "learning_rate",
        "optimizer", "out", "sequence_length", "seed", "eval_every", "save_every",
        "curves", "num_heads", "num_layers", "own_heads", "initial", "lora_rank",
        "self_distil", "tree_nodes", "eval_prompts",
    )  # fmt: skip

    num_heads: int = option(4, "heads")
    num_layers: int = option(1, "residual blocks per head")
    own_heads: bool = option(
        False,
        "give each head its own linear map to the vocabulary (version 1) instead of the target's",
    )
    head_decay: float = option(0.8, "weight of a head's loss, relative to the head before")
    soft: bool = option(False, "learn the target's distribution at each position, not the text")
    initial: str | None = option(
        None, "folder of heads of this shape to start from; default: untrained heads"
    )
    lora_rank: int = option(
        0, "rank of the LoRA that trains the target beside the heads; 0: the target stays frozen"
    )
    lora_alpha: float = option(16.0, "the LoRA is scaled by alpha / rank")
    heads_weight: float = option(0.2, "weight of the heads' loss relative to the target's own loss")
    heads_ramp: str = option(
        "constant",
        "schedule of that weight: constant, or rising along a sine",
        choices=("constant", "sine"),
    )
    head_rate: float = option(
        4.0, "learning rate of the heads, as a multiple of --learning-rate (the rate of the LoRA)"
    )
    self_distil: bool = option(
        False, "train the target to match its own original distribution, not the data"
    )
    isolate_documents: bool = option(
        False, "tokens do not attend to other documents packed into the same sequence"
    )
    tree_nodes: int = option(16, "nodes of the tree of choices, including the root")
    written_sequences: int = option(
        32, "texts that the target writes, on which the tree of choices is measured"
    )
    written_prompt: int = option(32, "tokens of held-out text that the target continues")
    eval_batches: int = option(8, "held-out batches per evaluation")
    eval_prompts: int = option(
        0, "held-out prompts on which tau of a chain of drafts is measured greedily; 0: none"
    )
    eval_tokens: int = option(64, "new tokens for each of them")
    learning_rate: float = option(1e-3, "peak learning rate")
    warmup_steps: int = option(100, "steps of linear warm-up")
    weight_decay: float = option(0.0, "weight decay, on matrices only")

    def __post_init__(self):
        super().__post_init__()
        self.check_weights(self.data)
        self.check_teacher({"--lora-rank": self.lora_rank}, {"--eval-prompts": self.eval_prompts})
        at_least(self, 1, "num_heads", "num_layers", "written_sequences", "written_prompt")
        at_least(self, 1, "eval_batches", "eval_tokens")
        at_least(self, 0, "lora_rank", "eval_prompts", "heads_weight")
        above(self, 0, "lora_alpha", "head_rate")
        within(self, 0, 1, "head_decay")
        if self.self_distil and not self.lora_rank:
            raise ValueError("--self-distil needs a target that is trained: pass --lora-rank, too")
        if self.tree_nodes < 2:
            raise ValueError(
                f"--tree-nodes is {self.tree_nodes}; it counts the root too, so it must be at "
                "least 2"
            )
        if self.eval_prompts and self.written_prompt + self.eval_tokens > self.sequence_length:
            raise ValueError(
                f"--written-prompt {self.written_prompt} and --eval-tokens {self.eval_tokens} "
                f"together are more than --sequence-length {self.sequence_length}"
            )
        least = self.written_prompt + self.num_heads + 2
        if self.sequence_length < least:
            raise ValueError(
                f"--sequence-length is {self.sequence_length}; a prompt of {self.written_prompt} "
                f"tokens and {self.num_heads} heads need {least} or more"
            )
