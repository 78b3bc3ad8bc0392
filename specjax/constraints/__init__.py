"""What a text is constrained to: expressions, schemas and choices as automata, and grammars."""

from specjax.automata import Automaton
from specjax.constraints.compiling import Constraint, automaton_of, check_least, constraints_of
from specjax.constraints.expressions import Choice, Expression, Grammar, JSONSchema, Regex
from specjax.constraints.grammars import GrammarMatcher, matchers_of
from specjax.constraints.matching import Matcher, Matchers

__all__ = [
    "Automaton",
    "Choice",
    "Constraint",
    "Expression",
    "Grammar",
    "GrammarMatcher",
    "JSONSchema",
    "Matcher",
    "Matchers",
    "Regex",
    "automaton_of",
    "check_least",
    "constraints_of",
    "matchers_of",
]
