"""Command line options that `specjax` and the training jobs share."""

from specjax.flags.constraints import add_constraint_arguments, constraint
from specjax.flags.exits import ending, open_streams, say
from specjax.flags.inputs import (
    EXAMPLE,
    add_draft_mesh_argument,
    add_model_arguments,
    add_processor_arguments,
    add_proposer_arguments,
    add_rule_arguments,
    add_sampling_arguments,
    choose,
    load_models,
    processing,
    read_prompts,
    sampling,
)
from specjax.flags.speculation import (
    DRAFTED,
    KINDS,
    NUMBERS,
    add_numbers_of_proposers,
    add_numbers_of_rules,
    make_drafter,
    make_rule,
    number_of,
    reads,
)
from specjax.flags.waiting import progress

__all__ = [
    "DRAFTED",
    "EXAMPLE",
    "KINDS",
    "NUMBERS",
    "add_constraint_arguments",
    "add_draft_mesh_argument",
    "add_model_arguments",
    "add_numbers_of_proposers",
    "add_numbers_of_rules",
    "add_processor_arguments",
    "add_proposer_arguments",
    "add_rule_arguments",
    "add_sampling_arguments",
    "choose",
    "constraint",
    "ending",
    "load_models",
    "make_drafter",
    "make_rule",
    "number_of",
    "open_streams",
    "processing",
    "progress",
    "read_prompts",
    "reads",
    "sampling",
    "say",
]
