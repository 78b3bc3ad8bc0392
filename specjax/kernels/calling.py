"""Compiles a kernel for this processor and registers it with XLA."""

from __future__ import annotations

import ctypes
import functools
import threading

import jax
from llvmlite import binding, ir

from specjax.kernels.loops import FORMS, Machine, kernel
from specjax.kernels.sharing import handler

_lock = threading.Lock()
_engines: list[binding.ExecutionEngine] = []  # they own the code


def registered(name: str) -> str:
    """The name under which XLA:CPU calls the kernel of a form.  Compiles it on the first call."""
    with _lock:
        return _registered(name)


@functools.cache
def _registered(name: str) -> str:
    form, target = FORMS[name], f"specjax_few_rows_{name}"
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = binding.get_host_cpu_features()
    chip = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        # Vectors of 512 bits are asked for where they are used.
        features=f"{features.flatten()},-prefer-256-bit".lstrip(","),
        opt=3,
    )
    module = ir.Module(target)
    module.triple = binding.get_process_triple()
    handler(module, form, kernel(module, form, _machine(features)), target)
    compiled = binding.parse_assembly(str(module))
    compiled.verify()
    tuning = binding.PipelineTuningOptions(speed_level=2)
    tuning.loop_vectorization = tuning.slp_vectorization = False  # loops have vectors already
    builder = binding.create_pass_builder(chip, tuning)
    builder.getModulePassManager().run(compiled, builder)
    engine = binding.create_mcjit_compiler(compiled, chip)
    engine.finalize_object()
    _engines.append(engine)
    address = engine.get_function_address(target)
    jax.ffi.register_ffi_target(target, _capsule(address), platform="cpu")
    return target


def _machine(features: binding.FeatureMap) -> Machine:
    if features.get("avx512f"):
        return Machine(16, 32)
    if features.get("avx2"):
        return Machine(8, 16)
    return Machine(4, 32)  # 64-bit ARM


def _capsule(address: int) -> object:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3
    return new(address, None, None)
