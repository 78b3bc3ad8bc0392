"""llama.cpp, in a process of its own.

Its Python package offers the engine's C functions.  Assisted generation and prompt lookup are not
among them, so the loops around these functions are here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pathlib
from typing import Any

import numpy as np

from bench.peers import gguf_file
from bench.peers.serving import Decoding

c: Any = importlib.import_module("llama_cpp")
_SLOTS = 8192


class Model:
    """A model with its KV cache; row r of a batch is sequence r of the cache."""

    def __init__(self, folder: str, dtype: str, threads: int, work: str) -> None:
        parts = pathlib.Path(folder).resolve().parts[-2:]
        path = pathlib.Path(work) / f"{'-'.join(parts)}-{dtype}.gguf"
        if not path.exists():
            gguf_file.write(pathlib.Path(folder), path, dtype)
        weights = c.llama_model_load_from_file(str(path).encode(), c.llama_model_default_params())
        if weights is None:
            raise ValueError(f"llama.cpp does not load {path}; its message is above")
        self._weights, self._threads = weights, threads
        # Its default is float16, whose texts differ from those of float32.
        self._cache_type = c.GGML_TYPE_F32 if dtype == "float32" else c.GGML_TYPE_F16
        self.vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(weights))
        self._batch = c.llama_batch_init(_SLOTS, 0, 1)
        self._rows, self._slots = 0, 0

    def start(self, rows: int, slots: int) -> None:
        """Empty the cache, and make it large enough for so many rows of so many slots."""
        if rows != self._rows or slots > self._slots:
            if self._rows:
                c.llama_free(self._context)
            settings = c.llama_context_default_params()
            settings.n_ctx = rows * slots
            settings.n_batch = settings.n_ubatch = 512
            settings.n_seq_max = rows
            settings.n_threads = settings.n_threads_batch = self._threads
            settings.type_k = settings.type_v = self._cache_type
            self._context = c.llama_init_from_model(self._weights, settings)
            self._rows, self._slots = rows, slots
        self._memory = c.llama_get_memory(self._context)
        c.llama_memory_clear(self._memory, False)

    def read(self, tokens: list[int], start: int, wanted: int, row: int = 0) -> list[int]:
        """Read a row's tokens from a position on; the greedy tokens after the last `wanted`."""
        found: list[int] = []
        for begin in range(0, len(tokens), 512):
            part = tokens[begin : begin + 512]
            rest = len(tokens) - begin - len(part)
            cells = [
                (token, start + begin + i, row, rest == 0 and i >= len(part) - wanted)
                for i, token in enumerate(part)
            ]
            found = self._decode(cells)
        return found

    def step(self, tokens: list[int], position: int) -> list[int]:
        """Read one token of each row at this position; the greedy tokens that follow."""
        return self._decode([(token, position, row, True) for row, token in enumerate(tokens)])

    def forget(self, length: int) -> None:
        """Keep only so many tokens of row 0."""
        c.llama_memory_seq_rm(self._memory, 0, length, -1)

    def _decode(self, cells: list[tuple[int, int, int, bool]]) -> list[int]:
        batch = self._batch
        batch.n_tokens = len(cells)
        for i, (token, position, row, answers) in enumerate(cells):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
            batch.logits[i] = answers
        if c.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed; its message is above")
        asked = [i for i, cell in enumerate(cells) if cell[3]]
        return [self._greedy(i) for i in asked]

    def _greedy(self, index: int) -> int:
        logits = c.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())


class LlamaCpp(Decoding):
    """Plain, assisted and prompt-lookup decoding; batches of several rows are plain."""

    can_impose = True

    def __init__(self, target: str, draft: str | None, dtype: str, threads: int, work: str) -> None:
        c._logger.set_verbose(False)  # it would tell about every tensor
        c.llama_backend_init()
        self._target = Model(target, dtype, threads, work)
        self._draft = Model(draft, dtype, threads, work) if draft is not None else None
        self.ways = ("plain", "ngram", *(("draft",) if self._draft else ()))
        self.version = importlib.metadata.version("llama-cpp-python")
        self._script: tuple[np.ndarray, np.ndarray] | None = None

    def impose(self, text: np.ndarray, right: np.ndarray) -> None:
        self._script = text[0], right[0]

    def generate(self, prompts: np.ndarray, new: int, way: str, num_drafts: int) -> np.ndarray:
        rows, length = prompts.shape
        slots = -(-(length + new + num_drafts + 1) // 256) * 256  # it rounds to these
        self._target.start(rows, slots)
        last = [
            self._target.read(prompt, 0, 1, row)[0] for row, prompt in enumerate(prompts.tolist())
        ]
        if way == "plain":
            columns = [last]
            for position in range(length, length + new - 1):
                columns.append(self._target.step(columns[-1], position))
            return np.array(columns).T
        text = [*prompts[0].tolist(), last[0]]
        draft = self._draft if way == "draft" else None
        if draft is not None:
            draft.start(1, slots)
        read = 0  # of the text, by the draft
        while len(text) < length + new:
            if draft is not None:
                drafts, read = _chain(draft, text, read, num_drafts)
            else:
                drafts = lookup(text, num_drafts)
            if self._script is not None:
                drafts = self._imposed(len(text), num_drafts)
            chosen = self._target.read([text[-1], *drafts], len(text) - 1, len(drafts) + 1)
            right = next((i for i, draft in enumerate(drafts) if draft != chosen[i]), len(drafts))
            text += chosen[: right + 1]
            self._target.forget(len(text) - 1)
            if draft is not None:
                read = min(read, len(text) - 1)
                draft.forget(read)
        return np.array([text[length : length + new]])

    def _imposed(self, start: int, num_drafts: int) -> list[int]:
        assert self._script is not None
        text, right = (x[start : start + num_drafts] for x in self._script)
        return np.where(right, text, (text + 1) % self._target.vocab).tolist()


def _chain(model: Model, text: list[int], read: int, num_drafts: int) -> tuple[list[int], int]:
    """Drafts after the text, and how many tokens the draft's cache holds then."""
    drafts = model.read(text[read:], read, 1)
    while len(drafts) < num_drafts:
        drafts += model.read(drafts[-1:], len(text) + len(drafts) - 1, 1)
    return drafts, len(text) + num_drafts - 1


def lookup(text: list[int], num_drafts: int, longest: int = 3) -> list[int]:
    """What followed the latest earlier place of the text's last tokens, or no drafts."""
    for size in range(longest, 0, -1):
        last = text[-size:]
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == last:
                return text[start + size : start + size + num_drafts]
    return []
