"""A RAG pipeline of Haystack whose generator drafts from the passages that were retrieved.

pip install 'haystack-ai>=3.0'
python examples/haystack_rag.py                            # decodes here, with and without drafts
python examples/haystack_rag.py http://127.0.0.1:8000/v1   # asks a server: `specjax serve`

The passages are functions of Python's own library.  Haystack's client asks for a chat, so the
server's target needs a chat template, which the shipped ones lack.
"""

import colorsys
import inspect
import sys
import time
from typing import Any

import openai
from haystack import Document, Pipeline, component
from haystack.components.builders import PromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret

import specjax

TEMPLATE = "{% for document in documents %}{{ document.content }}\n{% endfor %}{{ question }}"
QUESTION = "def rgb_to_yiq(r, g, b):"


@component
class SpecjaxGenerator:
    """Completes a prompt.  With `proposer="ngram"` it drafts from the passages, too."""

    def __init__(self, target: specjax.LanguageModel, **settings: Any) -> None:
        self.target, self.settings = target, settings

    @component.output_types(replies=list[str], meta=list[dict[str, Any]])
    def run(self, prompt: str, documents: list[Document] | None = None) -> dict[str, Any]:
        """Returns the text, and the tokens that a pass of the target wrote."""
        settings = dict(self.settings)
        if settings.get("proposer") == "ngram":
            settings["documents"] = [each.content for each in documents or () if each.content]
        output = specjax.generate(self.target, prompt, **settings)
        return {"replies": output.text, "meta": [{"tau": output.stats.mean_accepted_length}]}


def pipeline(generator: Any, passages: list[str], takes_documents: bool) -> Pipeline:
    """Retrieves two passages, writes the prompt, and generates."""
    store = InMemoryDocumentStore()
    store.write_documents([Document(content=passage) for passage in passages])
    made = Pipeline()
    made.add_component("retriever", InMemoryBM25Retriever(store, top_k=2))
    made.add_component("prompt", PromptBuilder(TEMPLATE, required_variables="*"))
    made.add_component("generator", generator)
    made.connect("retriever.documents", "prompt.documents")
    if takes_documents:
        made.connect("retriever.documents", "generator.documents")
    made.connect("prompt.prompt", "generator")
    return made


def ask(made: Pipeline, question: str) -> dict[str, Any]:
    asked = {"retriever": {"query": question}, "prompt": {"question": question}}
    return made.run(asked)["generator"]


def library() -> list[str]:
    names = ("rgb_to_yiq", "yiq_to_rgb", "rgb_to_hls", "hls_to_rgb", "rgb_to_hsv", "hsv_to_rgb")
    return [inspect.getsource(getattr(colorsys, name)) for name in names]


if __name__ == "__main__":
    if sys.argv[1:]:
        client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
        served = OpenAIChatGenerator(
            api_key=Secret.from_token("none"), api_base_url=sys.argv[1],
            model=client.models.list().data[0].id,
            generation_kwargs={"max_completion_tokens": 48, "seed": 0,
                               "extra_body": {"speculation": {"drafter": "lookup"}}},
        )  # fmt: skip
        print(ask(pipeline(served, library(), takes_documents=False), QUESTION)["replies"][0].text)
        sys.exit()
    target = specjax.load("checkpoints/pycode/target")
    for proposer in ("none", "ngram"):
        settings = {"max_new_tokens": 64, "proposer": proposer}
        made = pipeline(SpecjaxGenerator(target, **settings), library(), takes_documents=True)
        ask(made, QUESTION)  # compiles
        started = time.perf_counter()
        answer = ask(made, QUESTION)
        seconds = time.perf_counter() - started
        print(f"{proposer}: {answer['meta'][0]['tau']:.2f} tokens a pass, {seconds:.2f} s")
    print(answer["replies"][0])
