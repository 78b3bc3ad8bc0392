"""GGUF files of dense Llama and Qwen models: their header, configuration, tokenizer and packed
tensors."""

from specjax.files.gguf.model import configuration_of, file_of, tensors_of, tokenizer_in

__all__ = ["configuration_of", "file_of", "tensors_of", "tokenizer_in"]
