"""The options of `train.drafter`."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.options.fields import REQUIRED, at_least, option, within
from specjax.training.drafters import KINDS
from specjax.training.drafters.sizes import Sizes
from specjax.training.mixture import WeightOptions
from specjax.training.objectives import OBJECTIVES
from specjax.training.recordings import TaughtOptions
from specjax.training.targets import ServedOptions


@dataclasses.dataclass(frozen=True)
class DrafterOptions(Sizes, TaughtOptions, WeightOptions, ServedOptions):
    """The target, the data, the drafter's network, and the loop."""

    group = "drafter"
    common = (
        "target", "dtype", "data", "teacher", "mesh", "steps", "batch_size",
        "learning_rate", "optimizer", "out", "sequence_length", "seed", "eval_every",
        "save_every", "curves", "kind", "num_drafts", "num_layers", "taps",
        "draft_vocab_size", "initial", "loss", "anchors", "sampled_fraction",
        "sampled_sequences", "online", "layout", "eval_prompts",
    )  # fmt: skip

    kind: str = option(REQUIRED, "kind of drafter", choices=tuple(KINDS))
    dtype: str | None = option(
        None,
        "type of the target's weights; by default float32 on a CPU, else bfloat16",
        choices=("float32", "bfloat16"),  # it shares matrices with the drafter
    )
    mask_token: int | None = option(
        None,
        "id that stands for a token that is not there yet; by default the target's padding or mask "
        "token, or else its EOS token",
    )
    initial: str | None = option(
        None, "folder of a drafter of this kind and shape to start from; default: random"
    )
    loss: str | None = option(
        None,
        "training loss; by default forward-kl for eagle3 and peagle, cross-entropy for dflash, and "
        "cross-entropy-l1 for dspark",
        choices=tuple(OBJECTIVES),
    )
    depth_decay: float | None = option(
        None, "weight of a depth's loss relative to the depth before; by default as the authors do"
    )
    confidence_weight: float = option(1.0, "weight of the loss of the estimated acceptance")
    anchors: int = option(
        0,
        "positions of a sequence from which drafts are learned (eagle3 and peagle learn the first "
        "depth at every position); 0: an eighth of --sequence-length",
    )
    sampled_fraction: float | None = option(
        None,
        "fraction of the sequences with answers: those in --data, else those that the target then "
        "writes; default: 1 without text, 0.5 if --data has both, else 0",
    )
    sampled_sequences: int = option(1024, "how many sequences the target writes")
    sampled_prompt: int = option(32, "tokens of text that the target continues")
    sampled_batch: int = option(16, "sequences that the target writes at once")
    temperature: float = option(1.0, "temperature at which it writes them")
    online: bool = option(
        False,
        "learn from the drafts that the drafter makes while the target continues the texts with it",
    )
    keep_features: float = option(
        0.0,
        "gigabytes of the target's hidden states that are kept in OUT/features, so that a sequence "
        "that comes again is not read again; 0: none",
    )
    layout: str | None = option(
        None, "layout of the exported folder; by default that of the method's authors"
    )
    eval_batches: int = option(8, "held-out batches per evaluation")
    eval_prompts: int = option(
        0, "held-out prompts on which tau of a chain of drafts is measured greedily; 0: none"
    )
    eval_tokens: int = option(64, "new tokens for each of them")
    sequence_length: int = option(256, "tokens per sequence")
    batch_size: int = option(8, "sequences per step")
    learning_rate: float = option(1e-3, "peak learning rate")
    weight_decay: float = option(0.0, "weight decay, on matrices only")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_weights(self.data)
        self.check_teacher(
            {"--online": self.online, "--keep-features": self.keep_features},
            {"--eval-prompts": self.eval_prompts},
        )
        at_least(self, 1, "num_drafts", "sampled_sequences", "sampled_prompt", "sampled_batch")
        at_least(self, 1, "eval_batches", "eval_tokens")
        at_least(self, 0, "anchors", "draft_vocab_size", "markov_rank", "eval_prompts")
        at_least(self, 0, "confidence_weight", "temperature", "keep_features")
        if self.sampled_fraction is not None:
            within(self, 0, 1, "sampled_fraction")
        for name in ("num_layers", "mlp_size"):
            if getattr(self, name) is not None:
                at_least(self, 1, name)
        if self.depth_decay is not None:
            within(self, 0, 1, "depth_decay")
        if list(self.taps) != sorted(set(self.taps)):
            raise ValueError(
                f"--taps is {' '.join(map(str, self.taps))}; the layers must be distinct and "
                "ascending"
            )
        if self.draft_vocab_size and self.own_head is False:
            raise ValueError(
                "--draft-vocab-size needs an output matrix of the drafter's own: leave out "
                "--no-own-head"
            )
        if self.num_drafts + 2 > self.sequence_length:
            raise ValueError(
                f"--sequence-length is {self.sequence_length}; drafts of depth {self.num_drafts} "
                f"need {self.num_drafts + 2} or more"
            )
        if self.anchors > self.sequence_length:
            raise ValueError(
                f"--anchors is {self.anchors}; a sequence has {self.sequence_length} positions"
            )
        longest = self.sampled_prompt + (self.eval_tokens if self.eval_prompts else 0)
        if longest > self.sequence_length and (self.teacher is None or self.eval_prompts):
            raise ValueError(
                f"--sampled-prompt {self.sampled_prompt} and --eval-tokens {self.eval_tokens} "
                f"together are more than --sequence-length {self.sequence_length}"
            )

        if self.online and (self.sampled_fraction or self.keep_features):
            other = "sampled-fraction" if self.sampled_fraction else "keep-features"
            raise ValueError(f"--online learns from new text in every step: leave out --{other}")
        if self.online and not self.online_steps:
            raise ValueError(
                f"--sequence-length {self.sequence_length} has no room for --num-drafts "
                f"{self.num_drafts} after --sampled-prompt {self.sampled_prompt}"
            )

    @property
    def online_steps(self) -> int:
        """The steps of speculation that fit into a sequence even if every draft is accepted."""
        return (self.sequence_length + 1 - self.sampled_prompt) // (self.num_drafts + 1)

    @property
    def num_anchors(self) -> int:
        return self.anchors or max(1, self.sequence_length // 8)

    @property
    def settings(self) -> dict[str, Any]:
        """The sampling settings of generated sequences, as `Sampling.create` takes them."""
        return {"temperature": self.temperature, "top_k": 0, "top_p": 1.0}

    # A drafter is not trained on its own text, and documents are packed.
    draft_fraction = 0.0
    mix = "sequence"
    isolate_documents = False
