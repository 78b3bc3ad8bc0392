"""Lossless speculative decoding in JAX.

A proposer drafts a small tree of tokens, the target model verifies it in one pass, and a rule
accepts a path from its root.  Autoregressive decoding is the special case of a tree without drafts.
"""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax._internal.jit_cache import clear_programs, keep_programs
    from specjax._internal.paths import shipped
    from specjax.auditing import Report, audit
    from specjax.caches import KVCache, RecurrentCache
    from specjax.constraints import Automaton, Choice, Grammar, JSONSchema, Regex
    from specjax.decoding import Decoder, Logprobs, eos_of_rows
    from specjax.drafters import (
        adaptive,
        calibrated,
        cost_aware,
        load_drafter,
        load_mtp,
        save_drafter,
    )
    from specjax.files import load, save
    from specjax.generation import (
        Output,
        Request,
        Session,
        TextStream,
        generate,
        tune,
    )
    from specjax.methods import (
        PROPOSERS,
        BlockDraftSource,
        Datastore,
        DatastoreLookup,
        DatastoreSource,
        Drafter,
        DraftModel,
        DraftSource,
        DraftTree,
        Eagle3Source,
        EarlyExit,
        EarlyExitSource,
        Medusa,
        MedusaAdapter,
        MedusaBank,
        MedusaSource,
        NearSelf,
        NearSelfSource,
        PEagleSource,
        PublishedDrafter,
        TranslatedParams,
        TranslatedSource,
        Universal,
        UniversalParams,
        first_of,
        load_datastore,
        load_medusa,
        make_drafter,
        save_datastore,
        save_medusa,
        trim_vocabulary,
        window_draft,
    )
    from specjax.models import (
        FAMILIES,
        LanguageModel,
        LinenModel,
        Transformer,
        TransformerConfig,
        quantise,
    )
    from specjax.parallel import make_mesh
    from specjax.processors import Processors
    from specjax.proposers import (
        Adaptive,
        Aligned,
        BestFirst,
        Chain,
        ChoiceTree,
        CostAware,
        DynamicTree,
        FirstOf,
        Forced,
        NGram,
        NoProposer,
        StaticTree,
    )
    from specjax.rounding import quantise_folder
    from specjax.rules import (
        RULES,
        BlockVerification,
        Match,
        Rejection,
        SyntheticAcceptance,
        Threshold,
        Typical,
    )
    from specjax.sampling import Sampling, make_key, warp
    from specjax.text import Translation, translate
    from specjax.tree import Tree
    from specjax.tuning import Plan, step_costs
    from specjax.types import Block, DecodeState, ModelOutput, Params, Proposal, StepInfo, Verdict

__getattr__ = lazily(__name__, __file__)

__version__ = "0.1.0"

__all__ = [
    "FAMILIES",
    "PROPOSERS",
    "RULES",
    "Adaptive",
    "Aligned",
    "Automaton",
    "BestFirst",
    "Block",
    "BlockDraftSource",
    "BlockVerification",
    "Chain",
    "Choice",
    "ChoiceTree",
    "CostAware",
    "Datastore",
    "DatastoreLookup",
    "DatastoreSource",
    "DecodeState",
    "Decoder",
    "DraftModel",
    "DraftSource",
    "DraftTree",
    "Drafter",
    "DynamicTree",
    "Eagle3Source",
    "EarlyExit",
    "EarlyExitSource",
    "FirstOf",
    "Forced",
    "Grammar",
    "JSONSchema",
    "KVCache",
    "LanguageModel",
    "LinenModel",
    "Logprobs",
    "Match",
    "Medusa",
    "MedusaAdapter",
    "MedusaBank",
    "MedusaSource",
    "ModelOutput",
    "NGram",
    "NearSelf",
    "NearSelfSource",
    "NoProposer",
    "Output",
    "PEagleSource",
    "Params",
    "Plan",
    "Processors",
    "Proposal",
    "PublishedDrafter",
    "RecurrentCache",
    "Regex",
    "Rejection",
    "Report",
    "Request",
    "Sampling",
    "Session",
    "StaticTree",
    "StepInfo",
    "SyntheticAcceptance",
    "TextStream",
    "Threshold",
    "Transformer",
    "TransformerConfig",
    "TranslatedParams",
    "TranslatedSource",
    "Translation",
    "Tree",
    "Typical",
    "Universal",
    "UniversalParams",
    "Verdict",
    "adaptive",
    "audit",
    "calibrated",
    "clear_programs",
    "cost_aware",
    "eos_of_rows",
    "first_of",
    "generate",
    "keep_programs",
    "load",
    "load_datastore",
    "load_drafter",
    "load_medusa",
    "load_mtp",
    "make_drafter",
    "make_key",
    "make_mesh",
    "quantise",
    "quantise_folder",
    "save",
    "save_datastore",
    "save_drafter",
    "save_medusa",
    "shipped",
    "step_costs",
    "translate",
    "trim_vocabulary",
    "tune",
    "warp",
    "window_draft",
]
