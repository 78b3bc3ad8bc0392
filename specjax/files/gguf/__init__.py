"""GGUF files of dense Llama and Qwen models: their header, configuration and packed tensors."""

from specjax.files.gguf.model import configuration_of, file_of, tensors_of

__all__ = ["configuration_of", "file_of", "tensors_of"]
