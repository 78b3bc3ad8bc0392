"""specjax decodes with a target model by letting a proposer guess a small tree of tokens and a rule keep the part that
the target itself would have said.  Autoregressive decoding is the empty tree."""

from specjax.audit import Report, audit
from specjax.caches import KVCache, RecurrentCache
from specjax.decoding import Decoder, eos_of_rows
from specjax.drafters import MedusaAdapter, MedusaBank
from specjax.files import load, load_medusa, quantise, save, save_medusa
from specjax.generate import Output, TextStream, generate
from specjax.logprobs import Logprobs
from specjax.models import FAMILIES, LanguageModel, LinenModel, Transformer, TransformerConfig
from specjax.parallel import make_mesh
from specjax.processors import Processors
from specjax.proposers import (
    PROPOSERS,
    DraftModel,
    DraftTree,
    DynamicTree,
    EarlyExit,
    FirstOf,
    Medusa,
    NGram,
    NoProposer,
    Universal,
    UniversalParams,
)
from specjax.rules import RULES, BlockVerification, Match, Rejection, Threshold, Typical
from specjax.sampling import Sampling, make_key, warp
from specjax.text import Translation, translate
from specjax.types import Block, DecodeState, ModelOutput, Params, Proposal, StepInfo, Verdict

__version__ = "0.1.0"

__all__ = [
    "FAMILIES",
    "PROPOSERS",
    "RULES",
    "Block",
    "BlockVerification",
    "DecodeState",
    "Decoder",
    "DraftModel",
    "DraftTree",
    "DynamicTree",
    "EarlyExit",
    "FirstOf",
    "KVCache",
    "LanguageModel",
    "LinenModel",
    "Logprobs",
    "Match",
    "Medusa",
    "MedusaAdapter",
    "MedusaBank",
    "ModelOutput",
    "NGram",
    "NoProposer",
    "Output",
    "Params",
    "Processors",
    "Proposal",
    "RecurrentCache",
    "Rejection",
    "Report",
    "Sampling",
    "StepInfo",
    "TextStream",
    "Threshold",
    "Transformer",
    "TransformerConfig",
    "Translation",
    "Typical",
    "Universal",
    "UniversalParams",
    "Verdict",
    "audit",
    "eos_of_rows",
    "generate",
    "load",
    "load_medusa",
    "make_key",
    "make_mesh",
    "quantise",
    "save",
    "save_medusa",
    "translate",
    "warp",
]
