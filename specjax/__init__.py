"""specjax decodes with a target model by letting a proposer guess a small tree of tokens and a rule keep the part that
the target itself would have said.  Autoregressive decoding is the empty tree."""

from specjax.auditing import Report, audit
from specjax.bank import MedusaAdapter, MedusaBank
from specjax.cache import KVCache
from specjax.checkpoint import LanguageModel, load, save
from specjax.decoding import Decoder, eos_of_rows
from specjax.generate import Output, TextStream, generate
from specjax.logprobs import Logprobs
from specjax.medusa_files import load_medusa, save_medusa
from specjax.models import FAMILIES, LinenModel, Transformer, TransformerConfig
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
from specjax.quantised import quantise
from specjax.recurrent import RecurrentCache
from specjax.rules import RULES, BlockVerification, Match, Rejection, Threshold, Typical
from specjax.sampling import Sampling, make_key, warp
from specjax.sharding import make_mesh
from specjax.types import Block, DecodeState, ModelOutput, Params, Proposal, StepInfo, Verdict
from specjax.vocabulary import Translation, translate

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
