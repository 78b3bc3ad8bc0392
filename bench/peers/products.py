"""Chains of products of other engines, in a process of its own.

python -m bench.peers.products NAME THREADS    `bench.packed` starts it with a name of `ENGINES`

Each line of standard input asks for a chain, and the answer is the seconds of three runs.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Run = Callable[[], object]
RUNS = 3
"""The runs of each answer."""


class OpenVino:
    """Weights by groups of 128 inputs in 4 bits, and by outputs in 8.

    By default OpenVINO rounds activations to 8 bits, in groups of 32; if `in_float` it does not.
    """

    def __init__(self, threads: int, in_float: bool = False) -> None:
        self._ov: Any = importlib.import_module("openvino")
        self._op: Any = importlib.import_module("openvino.opset13")
        self._settings = {
            "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1
        }  # fmt: skip
        if in_float:
            self._settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
        self.version = importlib.metadata.version("openvino")

    def chain(self, hidden: int, mlp: int, layers: int, bits: int, rows: int) -> Run:
        op = self._op
        x = op.parameter([rows, hidden], np.float32)
        y = x
        for _ in range(layers):
            for inputs, outputs in ((hidden, mlp), (mlp, hidden)):
                y = op.matmul(y, self._matrix(inputs, outputs, bits), False, True)
        model = self._ov.Model([op.result(y)], [x])
        compiled = self._ov.Core().compile_model(model, "CPU", self._settings)
        request, given = compiled.create_infer_request(), np.ones((rows, hidden), np.float32)
        return lambda: request.infer({0: given})

    def _matrix(self, inputs: int, outputs: int, bits: int) -> Any:
        ov, op, rng = self._ov, self._op, np.random.default_rng(0)
        if bits == 8:
            codes = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
            scales = np.full((outputs, 1), 0.01 / np.sqrt(inputs), np.float32)
            wide = op.convert(op.constant(codes), np.float32)
            return op.multiply(wide, op.constant(scales))
        group = 128
        packed = ov.Tensor(ov.Type.u4, ov.Shape([outputs, inputs // group, group]))
        packed.data[:] = rng.integers(0, 256, packed.data.shape).astype(np.uint8)
        wide = op.convert(op.constant(packed), np.float32)
        zero = op.convert(op.constant(np.full((1, 1, 1), 8, np.uint8)), np.float32)
        scales = np.full((outputs, inputs // group, 1), 0.2 / np.sqrt(inputs), np.float32)
        wide = op.multiply(op.subtract(wide, zero), op.constant(scales))
        return op.reshape(wide, op.constant(np.array([outputs, inputs], np.int64)), False)


class _Settings(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


_TYPES = {4: (2, 18), 8: (8, 34)}
"""The number of Q4_0 and of Q8_0, and the bytes of 32 numbers, by the bits of a number."""


class LlamaCpp:
    """Q4_0 and Q8_0 by the C functions of ggml, which the package xllamacpp exports."""

    def __init__(self, threads: int) -> None:
        package: Any = importlib.import_module("xllamacpp")
        (library,) = pathlib.Path(package.__file__).parent.glob("xllamacpp*.so")
        self._c = ctypes.CDLL(str(library))
        self.version = importlib.metadata.version("xllamacpp")
        silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        self._silent = silent(lambda *_: None)  # it would tell about every matrix
        self._call("ggml_log_set", self._silent, None)
        self._backend = self._call("ggml_backend_cpu_init")
        self._call("ggml_backend_cpu_set_n_threads", self._backend, ctypes.c_int(threads))
        self._kept: list[np.ndarray] = []

    def chain(self, hidden: int, mlp: int, layers: int, bits: int, rows: int) -> Run:
        kind, size = _TYPES[bits]
        weights, work = self._context(), self._context()
        sizes = [pair for _ in range(layers) for pair in ((hidden, mlp), (mlp, hidden))]
        matrices = [self._tensor(weights, kind, *pair) for pair in sizes]
        self._call("ggml_backend_alloc_ctx_tensors_from_buft", weights, self._buffers(bits))
        for matrix, (inputs, outputs) in zip(matrices, sizes, strict=True):
            self._write(matrix, _blocks(inputs, outputs, bits, size))
        x = y = self._tensor(work, 0, hidden, rows)
        for matrix in matrices:
            y = self._call("ggml_mul_mat", work, matrix, y)
        graph = self._call("ggml_new_graph", work)
        self._call("ggml_build_forward_expand", graph, y)
        self._call("ggml_backend_alloc_ctx_tensors", work, self._backend)
        self._write(x, np.ones((rows, hidden), np.float32))
        return lambda: self._call("ggml_backend_graph_compute", self._backend, graph)

    def _call(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        function = getattr(self._c, name)
        function.restype = ctypes.c_void_p
        return ctypes.c_void_p(function(*arguments))

    def _context(self) -> ctypes.c_void_p:
        return self._call("ggml_init", _Settings(2**20, None, True))

    def _tensor(self, context: ctypes.c_void_p, kind: int, *shape: int) -> ctypes.c_void_p:
        sizes = (ctypes.c_int64(size) for size in shape)
        return self._call("ggml_new_tensor_2d", context, ctypes.c_int(kind), *sizes)

    def _buffers(self, bits: int) -> ctypes.c_void_p:
        """The buffers of such weights: in Q4_0 those that put matrices in another order."""
        device = self._call("ggml_backend_dev_by_type", ctypes.c_int(0))
        registry = self._call("ggml_backend_dev_backend_reg", device)
        name = b"ggml_backend_dev_get_extra_bufts"
        address = self._call("ggml_backend_reg_get_proc_address", registry, name).value
        if address and bits == 4:
            many = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)
            found = many(device)
            if found and found[0]:
                return ctypes.c_void_p(found[0])
        return self._call("ggml_backend_cpu_buffer_type")

    def _write(self, tensor: ctypes.c_void_p, data: np.ndarray) -> None:
        self._kept.append(data)
        place, zero = ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(0)
        self._call("ggml_backend_tensor_set", tensor, place, zero, ctypes.c_size_t(data.nbytes))


def _blocks(inputs: int, outputs: int, bits: int, size: int) -> np.ndarray:
    """Random blocks of 32 numbers: a scale in float16, and codes."""
    made = np.random.default_rng(0).integers(0, 256, (outputs, inputs // 32, size)).astype(np.uint8)
    scale = np.float16((0.2 if bits == 4 else 0.01) / np.sqrt(inputs))
    made[:, :, :2] = np.frombuffer(scale.tobytes(), np.uint8)
    return made


ENGINES: dict[str, Callable[[int], Any]] = {
    "openvino": OpenVino,
    "openvino-float": lambda threads: OpenVino(threads, in_float=True),
    "llama.cpp": LlamaCpp,
}


def main(name: str, threads: str) -> None:
    try:
        engine = ENGINES[name](int(threads))
    except Exception as error:  # of any library: the other side says what failed
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return
    print(json.dumps({"version": engine.version}), flush=True)
    made: dict[tuple[int, ...], Run] = {}
    for line in sys.stdin:
        key = tuple(json.loads(line))
        if key not in made:
            made.clear()
            made[key] = engine.chain(*key)
            made[key]()
        seconds = []
        for _ in range(RUNS):
            started = time.perf_counter()
            made[key]()
            seconds.append(time.perf_counter() - started)
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
