"""An operation of XLA:CPU that waits, outside of Python.

A callback into Python would wait for the interpreter, which the host needs for its dispatches: the
two would delay each other, as no chip does.
"""

from __future__ import annotations

import ctypes
import functools
import time

import jax
import jax.numpy as jnp
from jax import Array

from specjax import kernels

_NAME = "specjax_bench_late"
_NEAR = 200_000  # nanoseconds before the end, from where the thread looks at the clock again
_VERSION = 1  # the minor version of XLA's interface for foreign functions

# XLA calls it with a frame (`XLA_FFI_CallFrame` in jaxlib's `include/xla/ffi/api/c_api.h`), whose
# inputs are any number and the microseconds to wait.
_CODE = """
declare i32 @clock_gettime(i32, ptr)
declare i32 @nanosleep(ptr, ptr)
declare i32 @sched_yield()

define i64 @now() {{
  %at = alloca [2 x i64]
  %status = call i32 @clock_gettime(i32 {clock}, ptr %at)
  %seconds = load i64, ptr %at
  %rest.at = getelementptr i64, ptr %at, i64 1
  %rest = load i64, ptr %rest.at
  %scaled = mul i64 %seconds, 1000000000
  %result = add i64 %scaled, %rest
  ret i64 %result
}}

define i64 @{name}(ptr %frame) {{
  %started = call i64 @now()
  %extension.at = getelementptr i8, ptr %frame, i64 8
  %extension = load ptr, ptr %extension.at
  %asked = icmp ne ptr %extension, null
  br i1 %asked, label %describe, label %work
describe:  ; XLA asks for the version
  %metadata.at = getelementptr i8, ptr %extension, i64 24
  %metadata = load ptr, ptr %metadata.at
  %major = getelementptr i8, ptr %metadata, i64 24
  %minor = getelementptr i8, ptr %metadata, i64 28
  store i32 0, ptr %major
  store i32 {version}, ptr %minor
  ret i64 0
work:
  %inputs.at = getelementptr i8, ptr %frame, i64 72
  %inputs = load ptr, ptr %inputs.at
  %second.at = getelementptr ptr, ptr %inputs, i64 1
  %second = load ptr, ptr %second.at
  %wait.at.at = getelementptr i8, ptr %second, i64 24
  %wait.at = load ptr, ptr %wait.at.at
  %micro = load i32, ptr %wait.at
  %wide = zext i32 %micro to i64
  %wait = mul i64 %wide, 1000
  %end = add i64 %started, %wait
  %outputs.at = getelementptr i8, ptr %frame, i64 112
  %outputs = load ptr, ptr %outputs.at
  %first = load ptr, ptr %outputs
  %result.at.at = getelementptr i8, ptr %first, i64 24
  %result.at = load ptr, ptr %result.at.at
  store float 0.0, ptr %result.at
  %time = alloca [2 x i64]
  %time.rest = getelementptr i64, ptr %time, i64 1
  br label %look
look:
  %now = call i64 @now()
  %left = sub i64 %end, %now
  %over = icmp sle i64 %left, 0
  br i1 %over, label %leave, label %stay
stay:
  %long = icmp sgt i64 %left, {near}
  br i1 %long, label %sleep, label %yield
yield:
  %yielded = call i32 @sched_yield()
  br label %look
sleep:
  %most = sub i64 %left, {near}
  %seconds = sdiv i64 %most, 1000000000
  %rest = srem i64 %most, 1000000000
  store i64 %seconds, ptr %time
  store i64 %rest, ptr %time.rest
  %slept = call i32 @nanosleep(ptr %time, ptr null)
  br label %look
leave:
  ret i64 0
}}
"""


@functools.cache
def _registered() -> str:
    if not kernels.usable():
        raise ValueError("injected delays need llvmlite on Linux or macOS: pip install llvmlite")
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    text = _CODE.format(name=_NAME, clock=time.CLOCK_MONOTONIC, near=_NEAR, version=_VERSION)
    engine = binding.create_mcjit_compiler(
        binding.parse_assembly(text), binding.Target.from_default_triple().create_target_machine()
    )
    engine.finalize_object()
    address = engine.get_function_address(_NAME)
    engine.detach()  # the code stays until the process ends, since XLA's threads may be in it
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3
    jax.ffi.register_ffi_target(_NAME, new(address, None, None), platform="cpu")
    return _NAME


def late(number: Array, milliseconds: float) -> Array:
    """0.0, at least `milliseconds` after a number is there."""
    call = jax.ffi.ffi_call(_registered(), jax.ShapeDtypeStruct((), jnp.float32))
    return call(number, jnp.int32(round(1e3 * milliseconds)))
