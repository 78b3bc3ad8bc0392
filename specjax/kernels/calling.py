"""Compiles a kernel for this processor and registers it with XLA."""

from __future__ import annotations

import ctypes
import functools
import platform
import threading
from collections.abc import Callable
from typing import Any

import jax
import llvmlite
from llvmlite import binding, ir

from specjax._internal import kept_programs
from specjax.kernels.attending import Attention
from specjax.kernels.coded import work_of
from specjax.kernels.coding import VNNI, Coding
from specjax.kernels.columns import product_of
from specjax.kernels.drawing import Drawing
from specjax.kernels.forms import FORMS, STACKED, Machine
from specjax.kernels.keeping import place_of, read_code, write_code
from specjax.kernels.layer_forms import LayersForm
from specjax.kernels.layering import Layers
from specjax.kernels.pieces import Joined
from specjax.kernels.sharing import Work, handler
from specjax.kernels.threefry import RandomBits
from specjax.kernels.writing import SlotsWriting, Writing

_lock = threading.Lock()


def product(dtype: str) -> str:
    """Returns the name under which XLA:CPU calls products with weights of this dtype.

    The first call of this function compiles them.
    """
    work = product_of(FORMS[dtype], machine())
    return _registered(f"specjax_few_rows_{dtype}", work, "product", dtype)


def stacked(dtype: str) -> str:
    """Returns the name as `product`, for products with one matrix of a stack."""
    work = product_of(STACKED[dtype], machine(), stacked=True)
    return _registered(f"specjax_few_rows_of_a_stack_{dtype}", work, "stacked", dtype)


def codes(dtype: str, coding: Coding) -> str:
    """Returns the name as `product`, for products with codes that have scales."""
    if coding.digits > 1 and VNNI not in byte_lanes():
        raise ValueError("this processor does not multiply bytes by VNNI")
    work = work_of(coding, machine(), VNNI in byte_lanes())
    return _registered(coding.name, work, "codes", dtype, coding)


def attention(dtype: str, dim: int, capped: bool, page: int | None = None) -> str:
    """Returns the name as `product`, for attention with keys and values of this dtype."""
    pages = "" if page is None else f"_pages_of_{page}"
    name = f"specjax_attention_{dtype}_{dim}{'_capped' if capped else ''}{pages}"
    work = Attention(dtype, dim, capped, machine(), page)
    return _registered(name, work, "attention", dtype, dim, capped, page)


def writing(dtype: str, page: int) -> str:
    """Returns the name as `product`, for writing tokens into pages of this dtype."""
    work = Writing(dtype, page)
    return _registered(f"specjax_writing_{dtype}_{page}", work, "writing", dtype, page)


def writing_slots(dtype: str) -> str:
    """Returns the name as `product`, for writing tokens into slots of this dtype."""
    return _registered(
        f"specjax_writing_slots_{dtype}", SlotsWriting(dtype), "writing_slots", dtype
    )


def layers(dtype: str, form: LayersForm) -> str:
    """Returns the name as `product`, for whole layers; `dtype` is that of the matrices."""
    work = Layers(form, machine(), VNNI in byte_lanes())
    return _registered(f"specjax_layers_{form.name}", work, "layers", dtype, form)


def random_bits(dtype: str) -> str:
    """Returns the name as `product`, for random numbers of this dtype, which is uint32."""
    work = RandomBits(machine().lanes)
    return _registered(f"specjax_random_bits_{dtype}", work, "random_bits", dtype)


def drawing(dtype: str) -> str:
    """Returns the name as `product`, for draws from logits of this dtype, which is float32."""
    work = Drawing(machine().lanes)
    return _registered(f"specjax_drawing_{dtype}", work, "drawing", dtype)


_names: set[str] = set()


def _registered(target: str, work: Work, function: str, *arguments: Any) -> str:
    """Registers a work once, and records the call of `function` that has done so."""
    with _lock:
        if target not in _names:
            register(work, target)
            kept_programs.needs(__name__, function, *arguments)
            _names.add(target)
        return target


def register(work: Work, target: str) -> str:
    """Compiles the kernel of a work, or finds its machine code, and registers it as `target`."""
    jax.ffi.register_ffi_target(target, _capsule(address_of(work, target)), platform="cpu")
    return target


def address_of(work: Work, target: str) -> int:
    """Returns the address of the function `target`, which XLA calls for a work."""
    for piece in work.pieces if isinstance(work, Joined) else ():
        if piece.name not in _pieces:
            binding.add_symbol(piece.name, _compiled(piece.name, piece.define))
            _pieces.add(piece.name)
    return _compiled(target, lambda module: handler(module, work, target))


_pieces: set[str] = set()


def _compiled(name: str, write: Callable[[ir.Module], None]) -> int:
    """Returns the address of the function `name` in a module that `write` fills."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    found = binding.get_host_cpu_features()
    # The loops have vectors of 512 bits on purpose, so LLVM must not halve them.
    more = ",-prefer-256-bit" if found.get("avx512f") else ""
    cpu, features = binding.get_host_cpu_name(), f"{found.flatten()}{more}"
    chip = binding.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, opt=3
    )
    module = ir.Module(name)
    module.triple = binding.get_process_triple()
    write(module)
    text = str(module)
    versions = llvmlite.__version__, ".".join(map(str, binding.llvm_version_info))
    place = place_of(text, cpu, features, *versions)
    code = read_code(place)
    compiled = binding.parse_assembly(text)
    if code is None:
        compiled.verify()
        tuning = binding.PipelineTuningOptions(speed_level=2)
        tuning.loop_vectorization = tuning.slp_vectorization = False  # loops have vectors already
        builder = binding.create_pass_builder(chip, tuning)
        builder.getModulePassManager().run(compiled, builder)
    engine = binding.create_mcjit_compiler(compiled, chip)
    # LLVM asks for the code of the module before it makes it, and otherwise hands it over.
    engine.set_object_cache(lambda _, made: write_code(place, made), lambda _: code)
    engine.finalize_object()
    address = engine.get_function_address(name)
    engine.detach()  # the code stays until the process ends, since XLA's threads may be in it
    return address


def machine() -> Machine:
    """Returns the LLVM machine of this processor."""
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return Machine(16, 32, bool(features.get("amx-bf16")) and _may_use_tiles(), tiles())
    if features.get("avx2"):
        return Machine(8, 16)
    return Machine(4, 32 if platform.machine().lower() in ("aarch64", "arm64") else 16)


@functools.cache
def byte_lanes() -> tuple[int, ...]:
    """Returns the words of vectors whose bytes are multiplied: of 16 with VNNI, of 8 with AVX2."""
    features = binding.get_host_cpu_features()
    if features.get("avx512vnni") and features.get("avx512vl") and features.get("avx512bw"):
        return VNNI, 8
    return (8,) if features.get("avx2") else ()


@functools.cache
def tiles() -> bool:
    """Returns whether this processor multiplies tiles of bytes, and Linux lets this process."""
    features = binding.get_host_cpu_features()
    return bool(features.get("amx-int8") and features.get("gfni")) and _may_use_tiles()


@functools.cache
def _may_use_tiles() -> bool:
    """Returns whether Linux lets this process use the registers of tiles."""
    if platform.system() != "Linux":
        return False
    allow, tile_data = 0x1023, 18  # ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA
    return ctypes.pythonapi.syscall(158, allow, tile_data) == 0  # arch_prctl


def _capsule(address: int) -> object:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3
    return new(address, None, None)
