"""OpenVINO GenAI, in a process of its own."""

from __future__ import annotations

import importlib
import importlib.metadata
import pathlib
from typing import Any

import numpy as np

from bench.peers.serving import Decoding

openvino: Any = importlib.import_module("openvino")
genai: Any = importlib.import_module("openvino_genai")
PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "int8": "f32", "int4": "f32"}
"""What it computes in.  In `int8` and `int4` only the weights have few bits, as it recommends."""


class OpenVino(Decoding):
    """`LLMPipeline` on the CPU; it has no way to impose drafts."""

    def __init__(self, target: str, draft: str | None, dtype: str, threads: int, work: str) -> None:
        self._options = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[dtype],
            "INFERENCE_NUM_THREADS": threads,
        }
        self._target = converted(target, dtype, work)
        # Its assisted generation asks the tokenizer of both models.
        speaks = draft is not None and (pathlib.Path(target) / "tokenizer.json").exists()
        self._draft = converted(draft, dtype, work) if draft is not None and speaks else None
        self.ways = ("plain", "ngram", *(("draft",) if self._draft else ()))
        self.version = importlib.metadata.version("openvino-genai")
        self._pipes: dict[str, Any] = {}

    def generate(self, prompts: np.ndarray, new: int, way: str, num_drafts: int) -> np.ndarray:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos, config.do_sample = True, False
        config.set_eos_token_id(0)  # ignored, but it refuses to run without one
        if way != "plain":
            config.num_assistant_tokens = num_drafts
        if way == "ngram":
            config.max_ngram_size = 3
        ids = openvino.Tensor(prompts), openvino.Tensor(np.ones_like(prompts))
        found = self._pipe(way).generate(genai.TokenizedInputs(*ids), config)
        return np.array(found.tokens)

    def _pipe(self, way: str) -> Any:
        if way not in self._pipes:
            options = dict(self._options)
            if way == "draft":
                options["draft_model"] = genai.draft_model(self._draft, "CPU", **self._options)
            if way == "ngram":
                options["prompt_lookup"] = True
            self._pipes[way] = genai.LLMPipeline(self._target, "CPU", **options)
        return self._pipes[way]


def converted(folder: str, dtype: str, work: str) -> str:
    """The folder of a model in OpenVINO's format; it is written if it does not exist yet."""
    made = pathlib.Path(work) / f"{_name(folder)}-openvino-{dtype}"
    if (made / "done").exists():
        return str(made)
    intel = importlib.import_module("optimum.intel")
    few = intel.OVWeightQuantizationConfig(bits=4) if dtype == "int4" else None
    model = intel.OVModelForCausalLM.from_pretrained(
        folder,
        export=True,
        compile=False,
        load_in_8bit=dtype == "int8",
        quantization_config=few,
    )
    model.save_pretrained(made)
    if (pathlib.Path(folder) / "tokenizer.json").exists():
        read = importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder)
        convert = importlib.import_module("openvino_tokenizers").convert_tokenizer
        pair = convert(read, with_detokenizer=True)
        for one, name in zip(pair, ("tokenizer", "detokenizer"), strict=True):
            openvino.save_model(one, made / f"openvino_{name}.xml")
    (made / "done").touch()
    return str(made)


def _name(folder: str) -> str:
    return "-".join(pathlib.Path(folder).resolve().parts[-2:])
