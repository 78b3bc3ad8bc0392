"""Command-line options that `specjax` and the training jobs share."""

from specjax.flags.constraints import add_constraint_arguments, constraint
from specjax.flags.exits import ending, open_streams, say
from specjax.flags.inputs import (
    add_device_arguments,
    add_model_arguments,
    add_processor_arguments,
    add_prompt_arguments,
    add_proposer_arguments,
    add_rule_arguments,
    add_sampling_arguments,
    choose,
    processing,
    read_prompts,
    sampling,
)
from specjax.flags.loading import load_models
from specjax.flags.speculation import (
    DRAFTED,
    KINDS,
    NUMBERS,
    add_numbers_of_proposers,
    add_numbers_of_rules,
    drafting,
    make_drafter,
    make_rule,
    number_of,
    reads,
)
from specjax.flags.waiting import progress

__all__ = [
    "DRAFTED",
    "KINDS",
    "NUMBERS",
    "add_constraint_arguments",
    "add_device_arguments",
    "add_model_arguments",
    "add_numbers_of_proposers",
    "add_numbers_of_rules",
    "add_processor_arguments",
    "add_prompt_arguments",
    "add_proposer_arguments",
    "add_rule_arguments",
    "add_sampling_arguments",
    "choose",
    "constraint",
    "drafting",
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
