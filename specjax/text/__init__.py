"""Text and tokens: chat templates, vocabularies and stop strings."""

from specjax.text.chat import Messages, render
from specjax.text.stops import Texts
from specjax.text.vocabulary import Translation, translate, vocabulary_digest

__all__ = [
    "Messages",
    "Texts",
    "Translation",
    "render",
    "translate",
    "vocabulary_digest",
]
