"""GGUF files of dense Llama and Qwen models: their header, configuration, tokenizer and packed
tensors."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.files.gguf.model import configuration_of, tensors_of, tokenizer_in

__getattr__ = lazily(__name__, __file__)

__all__ = ["configuration_of", "tensors_of", "tokenizer_in"]
