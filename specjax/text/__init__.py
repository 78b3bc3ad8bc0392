"""Text and tokens: chat templates, vocabularies and stop strings."""

from specjax.text.chat import SPECIAL_TOKENS, Messages, render
from specjax.text.rust import no_panic
from specjax.text.sandbox import ask
from specjax.text.stop_strings import Texts
from specjax.text.vocabulary import Translation, token_bytes, translate, vocabulary_digest
from specjax.text.words import Words

__all__ = [
    "SPECIAL_TOKENS",
    "Messages",
    "Texts",
    "Translation",
    "Words",
    "ask",
    "no_panic",
    "render",
    "token_bytes",
    "translate",
    "vocabulary_digest",
]
