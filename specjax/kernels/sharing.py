"""A handler that XLA calls, which shares the parts of a work between XLA's own threads.

XLA calls it with the address of a frame, whose layout is the C interface of XLA's foreign functions
(`XLA_FFI_CallFrame` in jaxlib's `include/xla/ffi/api/c_api.h`).  Within a major version of that
interface, fields are only added at the end of its structures.

The caller makes a job and schedules a task for each other thread.  All of them take the next part
until none is left, so a thread that is busy elsewhere delays no other: the others take its parts.
The last one to leave frees the job.

Parts are taken in their order.  So a part may wait until the parts before it are done, and a work
may consist of phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from llvmlite import ir

from specjax.kernels.emitting import INT8, INT32, WORD, Emitter, Value, word

# Offsets in bytes.
_EXTENSION, _API, _CONTEXT = 8, 16, 24  # of a frame
_COUNT_ARGUMENTS, _ARGUMENTS, _RESULTS = 56, 72, 112  # too
_METADATA = 24  # of an extension
_MAJOR, _MINOR = 24, 28  # of metadata
_SCHEDULE, _COUNT_THREADS = 136, 144  # of the table of functions
_DATA, _SIZES = 24, 40  # of a buffer
_VERSION = (0, 1)

_PARTS, _NEXT, _DONE, _USERS, _COUNTERS = 0, 1, 2, 3, 4
"""The first words of a job; the addresses of its buffers and the sizes follow."""

_WORTH = 2**16
"""The multiplications for which a further thread pays."""

_SPINS = 4096
"""Checks of whether the other threads are done, before each of which a thread lets others run."""


class Work(Protocol):
    """The work of a kernel, in parts that threads do in any order.

    Attributes:
      name: of its functions.
      buffers: the number that XLA passes: the arguments, and a single result.
      sizes: (buffer, axis) of each size that the work depends on.
    """

    @property
    def name(self) -> str: ...

    @property
    def buffers(self) -> int: ...

    @property
    def sizes(self) -> Sequence[tuple[int, int]]: ...

    def products(self, emit: Emitter, sizes: Sequence[Value]) -> Value:
        """Returns the number of multiplications."""
        ...

    def parts(self, emit: Emitter, sizes: Sequence[Value], threads: Value, worth: Value) -> Value:
        """Returns the number of parts for some threads, if `worth` products pay for each."""
        ...

    def function(self, module: ir.Module) -> ir.Function:
        """Builds void f(buffers..., part, parts, sizes...), which does one part."""
        ...


def part_of(module: ir.Module, name: str, places: Sequence[ir.Type], words: int) -> ir.Function:
    """Declares `Work.function`: it gets addresses of `places`, then so many words."""
    arguments = [*(place.as_pointer() for place in places), *[WORD] * words]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), f"{name}_part")
    function.linkage = "internal"
    return function


@runtime_checkable
class Phased(Work, Protocol):
    """A work whose parts wait for one another, with buffers that may be repeated for each layer.

    XLA passes `buffers - results` arguments and then the arguments of each layer; and `results`
    results and then those of each layer.  The function gets three words before its part: the
    address of the number of parts that are done; the address of the table of the layers' buffers,
    in which a layer has its arguments and then its results; and `threads`, as `parts` got it.

    Attributes:
      results: the number of results that no layer has for itself.
      each: the numbers of arguments and of results that a layer has, or zeros.
    """

    @property
    def results(self) -> int: ...

    @property
    def each(self) -> tuple[int, int]: ...


class _Handler(Emitter):
    def field(self, base: Value, offset: int) -> Value:
        return self.b.load(self.address(base, offset))

    def address(self, base: Value, offset: int, kind: ir.Type = WORD) -> Value:
        return self.b.inttoptr(self.b.add(base, word(offset)), kind.as_pointer())

    def count(self, job: Value, index: int, by: int) -> Value:
        """Adds to a word of a job that other threads change, and returns its value before."""
        return self.b.atomic_rmw("add", self.address(job, 8 * index), word(by), "acq_rel")

    def ask(self, api: Value, function: int, *fields: Value) -> Value:
        """Calls a function of XLA with a structure on the stack; 0 means that it succeeded."""
        words = [word(8 * (2 + len(fields))), word(0), *fields]
        place = self.b.alloca(WORD, word(len(words)))
        base = self.b.ptrtoint(place, WORD)
        for i, value in enumerate(words):
            self.b.store(value, self.address(base, 8 * i))
        kind = ir.FunctionType(WORD, [WORD]).as_pointer()
        return self.b.call(self.b.inttoptr(self.field(api, function), kind), [base])

    def whenever(self, condition: Value) -> ir.Block:
        """Starts a block where instructions go on if the condition holds; returns the other one."""
        then, otherwise = self.b.append_basic_block(), self.b.append_basic_block()
        self.b.cbranch(condition, then, otherwise)
        self.b.position_at_end(then)
        return otherwise


def handler(module: ir.Module, work: Work, name: str) -> None:
    """Defines XLA_FFI_Error* name(XLA_FFI_CallFrame*)."""
    share = _share(module, work)
    task = _task(module, work, share)
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
    made = work.results if isinstance(work, Phased) else 1
    given = work.buffers - made
    buffers = [emit.field(arguments, 8 * i) for i in range(given)]
    buffers += [emit.field(results, 8 * i) for i in range(made)]
    sizes = [emit.field(emit.field(buffers[i], _SIZES), 8 * axis) for i, axis in work.sizes]
    api, context = emit.field(frame, _API), emit.field(frame, _CONTEXT)
    threads = b.alloca(WORD)
    b.store(word(1), threads)
    emit.ask(api, _COUNT_THREADS, context, b.ptrtoint(threads, WORD))
    most = b.load(threads)
    most = b.select(b.icmp_signed("<", most, word(1)), word(1), most)
    worth = b.add(b.sdiv(work.products(emit, sizes), word(_WORTH)), word(1))
    parts = work.parts(emit, sizes, most, worth)
    users = emit.least(most, emit.least(parts, worth))

    places = [emit.field(buffer, _DATA) for buffer in buffers]
    begin = [parts, word(0), word(0), users, *places, *sizes]
    begin += [most] * isinstance(work, Phased)
    taken, layers = word(8 * len(begin)), word(0)
    if isinstance(work, Phased):
        both = word(sum(work.each))
        own = b.sub(emit.field(frame, _COUNT_ARGUMENTS), word(given))
        layers = b.sdiv(own, word(max(work.each[0], 1)))
        taken = b.add(taken, b.mul(b.mul(layers, both), word(8)))
    job = b.ptrtoint(b.call(emit.c("malloc"), [taken]), WORD)
    for i, value in enumerate(begin):
        b.store(value, emit.address(job, 8 * i))
    if isinstance(work, Phased):
        table = emit.address(job, 8 * len(begin))
        with emit.loop(word(0), layers, 1) as (layer, _, _):
            row = b.gep(table, [b.mul(layer, word(sum(work.each)))])
            before = 0
            sides = (arguments, given, work.each[0]), (results, made, work.each[1])
            for side, skipped, count in sides:
                for i in range(count):
                    number = b.add(b.mul(layer, word(count)), word(skipped + i))
                    place = emit.field(b.add(side, b.mul(number, word(8))), 0)
                    b.store(emit.field(place, _DATA), b.gep(row, [word(before + i)]))
                before += count
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
        let_others_run(emit, turn)
    b.unreachable()


def wait_for(emit: Emitter, done: Value, count: Value) -> None:
    """Waits until `count` parts are done, in the function of a `Phased` work."""
    b = emit.b
    after = b.append_basic_block()
    with emit.loop(word(0), word(2**62), 1) as (turn, _, _):
        enough = b.icmp_signed(">=", b.load_atomic(done, "acquire", 8), count)
        going_on = b.append_basic_block()
        b.cbranch(enough, after, going_on)
        b.position_at_end(going_on)
        let_others_run(emit, turn)
    b.unreachable()
    b.position_at_end(after)


def let_others_run(emit: Emitter, turn: Value) -> None:
    """Lets other threads of the system run, once in `_SPINS` turns of a loop that waits."""
    b = emit.b
    with b.if_then(b.icmp_signed("==", b.srem(turn, word(_SPINS)), word(_SPINS - 1))):
        b.call(emit.c("sched_yield"), [])


def _share(module: ir.Module, work: Work) -> ir.Function:
    """Builds void f(job), which does parts until none is left."""
    does = work.function(module)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [WORD]), f"{work.name}_share")
    function.linkage = "internal"
    emit, job = _Handler(function), function.args[0]
    b = emit.b
    after = range(_COUNTERS, _COUNTERS + work.buffers + len(work.sizes))
    words = [emit.field(job, 8 * i) for i in after]
    own: list[Value] = []
    if isinstance(work, Phased):
        own = [emit.address(job, 8 * at) for at in (_DONE, after.stop + 1)]
        own.append(emit.field(job, 8 * after.stop))
    places = [
        b.inttoptr(word, argument.type)
        for word, argument in zip(words[: work.buffers], does.args, strict=False)
    ]
    parts = emit.field(job, 8 * _PARTS)
    with emit.loop(word(0), word(2**62), 1):
        part = emit.count(job, _NEXT, 1)
        finished = emit.whenever(b.icmp_signed("<", part, parts))
        b.call(does, [*places, *own, part, parts, *words[work.buffers :]])
        emit.count(job, _DONE, 1)
        following = b.block
        b.position_at_end(finished)
        b.ret_void()
        b.position_at_end(following)
    b.unreachable()
    return function


def _task(module: ir.Module, work: Work, share: ir.Function) -> ir.Function:
    """Builds void f(void* job), which a thread of XLA runs."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [WORD]), f"{work.name}_task")
    function.linkage = "internal"
    emit, job = _Handler(function), function.args[0]
    emit.b.call(share, [job])
    _leave(emit, job)
    emit.b.ret_void()
    return function


def _leave(emit: _Handler, job: Value) -> None:
    b = emit.b
    with b.if_then(b.icmp_signed("==", emit.count(job, _USERS, -1), word(1))):
        b.call(emit.c("free"), [b.inttoptr(job, INT8.as_pointer())])
