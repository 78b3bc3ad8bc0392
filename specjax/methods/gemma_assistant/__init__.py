"""Gemma 4's assistants: a network that reads the target's cache, its source and its folders."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.methods.gemma_assistant.network import (
        Assistant,
        AssistantConfig,
        assistant_shapes,
        cluster_logits,
    )
    from specjax.methods.gemma_assistant.reader import ASSISTANT
    from specjax.methods.gemma_assistant.source import AssistantSource

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "ASSISTANT",
    "Assistant",
    "AssistantConfig",
    "AssistantSource",
    "assistant_shapes",
    "cluster_logits",
]
