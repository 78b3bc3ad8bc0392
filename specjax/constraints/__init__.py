"""Constraints of a text: expressions, schemas and choices as automata, and grammars."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.constraints.automaton import Automata, Automaton
    from specjax.constraints.compile import Constraint, automaton_of, check_least, constraints_of
    from specjax.constraints.expressions import Choice, Expression, Grammar, JSONSchema, Regex
    from specjax.constraints.grammar import GrammarMatcher, matchers_of
    from specjax.constraints.matching import Matcher, Matchers

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "Automata",
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
