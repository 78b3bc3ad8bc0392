"""Text and tokens: chat templates, vocabularies and stop strings."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.text.chat import Messages, render, template_of, unread_part
    from specjax.text.rust import no_panic
    from specjax.text.sandbox import ask
    from specjax.text.stop_strings import Texts
    from specjax.text.vocabulary import Translation, token_bytes, translate, vocabulary_digest
    from specjax.text.words import SPECIAL_TOKENS, Words

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "SPECIAL_TOKENS",
    "Messages",
    "Texts",
    "Translation",
    "Words",
    "ask",
    "no_panic",
    "render",
    "template_of",
    "token_bytes",
    "translate",
    "unread_part",
    "vocabulary_digest",
]
