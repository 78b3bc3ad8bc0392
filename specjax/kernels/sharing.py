"""A handler that XLA calls, which shares the columns of a product among XLA's own threads.

XLA calls it with the address of a frame, whose layout is the C interface of XLA's foreign functions
(`XLA_FFI_CallFrame` in jaxlib's `include/xla/ffi/api/c_api.h`).  Within a major version of that
interface, fields are only added at the end of its structures.

The caller makes a job and schedules a task for each other thread.  All of them take the next part
of the columns until none is left, so a thread that is busy elsewhere delays nobody: the others take
its parts.  The last one to leave frees the job.
"""

from __future__ import annotations

from llvmlite import ir

from specjax.kernels.emitting import INT8, INT32, WORD, Emitter, Value, word
from specjax.kernels.loops import Form

# Offsets in bytes.
_EXTENSION, _API, _CONTEXT, _ARGUMENTS, _RESULTS = 8, 16, 24, 72, 112  # of a frame
_METADATA = 24  # of an extension
_MAJOR, _MINOR = 24, 28  # of metadata
_SCHEDULE, _COUNT_THREADS = 136, 144  # of the table of functions
_DATA, _SIZES = 24, 40  # of a buffer
_VERSION = (0, 1)

_PLACES, _LIMITS = 3, 4  # x, w, y; rows, inner, stride, count
_PARTS, _NEXT, _DONE, _USERS, _WORDS = 7, 8, 9, 10, 11
"""Indices into the words of a job, after its places and limits."""

_PART = 2**16
"""Products of a weight and a number that are worth a part of their own."""

_SHARES = 2
"""Parts for each thread, so that one that begins late does less."""

_SPINS = 4096
"""Looks at whether the others are done, before each of which a thread lets others run."""


class _Handler(Emitter):
    def field(self, base: Value, offset: int) -> Value:
        return self.b.load(self.address(base, offset))

    def address(self, base: Value, offset: int, kind: ir.Type = WORD) -> Value:
        return self.b.inttoptr(self.b.add(base, word(offset)), kind.as_pointer())

    def count(self, job: Value, index: int, by: int) -> Value:
        """Add to a word of a job that other threads change, and return what was there before."""
        return self.b.atomic_rmw("add", self.address(job, 8 * index), word(by), "acq_rel")

    def ask(self, api: Value, function: int, *fields: Value) -> Value:
        """Call a function of XLA with a structure on the stack; 0 means that it succeeded."""
        words = [word(8 * (2 + len(fields))), word(0), *fields]
        place = self.b.alloca(WORD, word(len(words)))
        base = self.b.ptrtoint(place, WORD)
        for i, value in enumerate(words):
            self.b.store(value, self.address(base, 8 * i))
        kind = ir.FunctionType(WORD, [WORD]).as_pointer()
        return self.b.call(self.b.inttoptr(self.field(api, function), kind), [base])

    def whenever(self, condition: Value) -> ir.Block:
        """A new block where instructions go on if the condition holds; returns the other one."""
        then, otherwise = self.b.append_basic_block(), self.b.append_basic_block()
        self.b.cbranch(condition, then, otherwise)
        self.b.position_at_end(then)
        return otherwise


def handler(module: ir.Module, form: Form, loops: ir.Function, name: str) -> None:
    """Define XLA_FFI_Error* name(XLA_FFI_CallFrame*).

    Its arguments are x [rows, inner] and the matrix, its result is y [rows, count].
    """
    share, task = _share(module, form, loops), _task(module, form)
    emit = _Handler(ir.Function(module, ir.FunctionType(WORD, [WORD]), name))
    b = emit.b
    frame = emit.b.function.args[0]
    extension = emit.field(frame, _EXTENSION)
    with b.if_then(b.icmp_signed("!=", extension, word(0))):  # XLA asks for the version
        metadata = emit.field(extension, _METADATA)
        for offset, value in zip((_MAJOR, _MINOR), _VERSION, strict=True):
            b.store(ir.Constant(INT32, value), emit.address(metadata, offset, INT32))
        b.ret(word(0))
    arguments, results = emit.field(frame, _ARGUMENTS), emit.field(frame, _RESULTS)
    x, w, y = emit.field(arguments, 0), emit.field(arguments, 8), emit.field(results, 0)
    rows, inner = (emit.field(emit.field(x, _SIZES), offset) for offset in (0, 8))
    stride = emit.field(emit.field(w, _SIZES), 8 if form.by_columns else 0)
    count = emit.field(emit.field(y, _SIZES), 8)
    api, context = emit.field(frame, _API), emit.field(frame, _CONTEXT)
    threads = b.alloca(WORD)
    b.store(word(1), threads)
    emit.ask(api, _COUNT_THREADS, context, b.ptrtoint(threads, WORD))
    worth = b.sdiv(b.mul(b.mul(inner, count), rows), word(_PART))
    most = b.load(threads)
    most = b.select(b.icmp_signed("<", most, word(1)), word(1), most)
    parts = emit.least(b.mul(most, word(_SHARES)), b.add(worth, word(1)))
    users = emit.least(most, parts)

    job = b.ptrtoint(b.call(_c(module, "malloc", [WORD]), [word(8 * _WORDS)]), WORD)
    places = [emit.field(buffer, _DATA) for buffer in (x, w, y)]
    begin = [*places, rows, inner, stride, count, parts, word(0), word(0), users]
    for i, value in enumerate(begin):
        b.store(value, emit.address(job, 8 * i))
    with emit.loop(word(1), users, 1):
        error = emit.ask(api, _SCHEDULE, context, b.ptrtoint(task, WORD), job)
        with b.if_then(b.icmp_signed("!=", error, word(0))):  # nobody will come
            emit.count(job, _USERS, -1)
    b.call(share, [job])
    with emit.loop(word(0), word(2**62), 1) as (turn, _, _):
        done = b.load_atomic(emit.address(job, 8 * _DONE), "acquire", 8)
        going_on = emit.whenever(b.icmp_signed("==", done, parts))
        _leave(emit, job)
        b.ret(word(0))
        b.position_at_end(going_on)
        with b.if_then(b.icmp_signed("==", b.srem(turn, word(_SPINS)), word(_SPINS - 1))):
            b.call(_c(module, "sched_yield", []), [])
    b.unreachable()


def _share(module: ir.Module, form: Form, loops: ir.Function) -> ir.Function:
    """void f(job): multiply parts of the columns until none is left."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [WORD]), f"{form.name}_share")
    function.linkage = "internal"
    emit, job = _Handler(function), function.args[0]
    b = emit.b
    words = [emit.field(job, 8 * i) for i in range(_PLACES + _LIMITS)]
    places = [b.inttoptr(p, a.type) for p, a in zip(words, loops.args[:_PLACES], strict=False)]
    rows, inner, stride, count = words[_PLACES:]
    parts = emit.field(job, 8 * _PARTS)
    with emit.loop(word(0), word(2**62), 1):
        part = emit.count(job, _NEXT, 1)
        finished = emit.whenever(b.icmp_signed("<", part, parts))
        # Parts begin at multiples of 16 columns, so that no two write to one line of the cache.
        first, last = (
            emit.least(emit.whole(b.sdiv(b.mul(count, i), parts), 16), count)
            for i in (part, b.add(part, word(1)))
        )
        last = b.select(b.icmp_signed("==", b.add(part, word(1)), parts), count, last)
        b.call(loops, [*places, first, last, rows, inner, stride, count])
        emit.count(job, _DONE, 1)
        following = b.block
        b.position_at_end(finished)
        b.ret_void()
        b.position_at_end(following)
    b.unreachable()
    return function


def _task(module: ir.Module, form: Form) -> ir.Function:
    """void f(void* job), which a thread of XLA runs."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [WORD]), f"{form.name}_task")
    function.linkage = "internal"
    emit, job = _Handler(function), function.args[0]
    emit.b.call(module.globals[f"{form.name}_share"], [job])
    _leave(emit, job)
    emit.b.ret_void()
    return function


def _leave(emit: _Handler, job: Value) -> None:
    b = emit.b
    with b.if_then(b.icmp_signed("==", emit.count(job, _USERS, -1), word(1))):
        b.call(_c(b.module, "free", [INT8.as_pointer()]), [b.inttoptr(job, INT8.as_pointer())])


def _c(module: ir.Module, name: str, arguments: list[ir.Type]) -> ir.Function:
    """A function of C's library."""
    result = {"malloc": INT8.as_pointer(), "free": ir.VoidType(), "sched_yield": INT32}[name]
    found = module.globals.get(name)
    return found or ir.Function(module, ir.FunctionType(result, arguments), name)
