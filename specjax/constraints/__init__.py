"""What a text is constrained to: regular expressions, JSON schemas and choices, as automata."""

from specjax.automata import Automaton
from specjax.constraints.compiling import Constraint, automaton_of, check_least, constraints_of
from specjax.constraints.expressions import Choice, Expression, JSONSchema, Regex

__all__ = [
    "Automaton",
    "Choice",
    "Constraint",
    "Expression",
    "JSONSchema",
    "Regex",
    "automaton_of",
    "check_least",
    "constraints_of",
]
