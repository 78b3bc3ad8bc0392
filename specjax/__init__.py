"""specjax decodes with a target model by letting a proposer guess a small tree of tokens and a rule keep the part that
the target itself would have said.  Autoregressive decoding is the empty tree."""

from specjax.checkpoint import LanguageModel, load, save
from specjax.decoding import Decoder
from specjax.generate import Output, TextStream, generate
from specjax.models import FAMILIES, LinenModel, Transformer, TransformerConfig
from specjax.proposers import PROPOSERS, DraftModel, NGram, NoProposer
from specjax.rules import RULES, Match, Rejection
from specjax.sampling import Sampling, warp
from specjax.types import Block, DecodeState, ModelOutput, Params, Proposal, StepInfo, Verdict

__version__ = "0.1.0"

__all__ = [
    "FAMILIES",
    "PROPOSERS",
    "RULES",
    "Block",
    "DecodeState",
    "Decoder",
    "DraftModel",
    "LanguageModel",
    "LinenModel",
    "Match",
    "ModelOutput",
    "NGram",
    "NoProposer",
    "Output",
    "Params",
    "Proposal",
    "Rejection",
    "Sampling",
    "StepInfo",
    "TextStream",
    "Transformer",
    "TransformerConfig",
    "Verdict",
    "generate",
    "load",
    "save",
    "warp",
]
