"""Compiles the programs of an engine, and holds the batch that they work on.

    read        a chunk of a prompt, into a row of its own, or chunks of several prompts
    insert      that row as a state of the decoder, into a slot of the batch
    run         a few steps of the rows of one width
    peek        the new tokens of every slot, as one small array for the host
    copy        the first tokens of a slot, as a row that continues from there

With pages (`PageSizes`) all rows and the prompts that are read share the memory of their caches,
which is `pools` here, and `copy` takes no keys and values along: a row gets them by its table.

Every program has one shape (`read` and `run` have one for each width), and all of them run once
when the engine starts.  So nothing is compiled while requests wait.

On a CPU a step costs what it computes.  So rows whose drafters propose few tokens take steps of
their own, of that width, and do not pay for the widest drafter.  Each width is another program, and
a row always decodes with the same one, whatever the other rows are.  An accelerator reads the same
weights for few tokens as for many, and takes one step of the greatest width for all rows.

On a mesh the batch is split by row and its caches by head, too, as in `generate`.  A row of its own
is held by all devices, and split by head only.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from specjax._internal.quick_code import quick_jit
from specjax.caches import (
    Joint,
    Pool,
    cleared,
    copied_page,
    pools_of,
    with_pages,
    with_table,
    without_pages,
)
from specjax.decoding import Decoder, Logprobs, RowInputs, begin, put_row
from specjax.parallel import (
    constrain_like,
    device_bytes,
    devices_of,
    layout,
    require,
    row_parts,
    shard_pages,
)
from specjax.processors import Processors
from specjax.sampling import Sampling, make_key
from specjax.serve.news import News, news_of, peeked, recorded
from specjax.serve.page_sizes import PageSizes, caches
from specjax.serve.per_row import PLAIN, PerRow, expected_document
from specjax.serve.reading import Reader, Reading, padded, widths
from specjax.serve.shardings import Shardings
from specjax.types import DecodeState, Params

MOST_STEPS = 48
"""The most steps in a turn."""

_EMPTY_TURNS = 9
"""The number of empty turns that are timed."""

ROWS = 4
"""The prompts that a pass reads together, in an engine with pages (4)."""

SNAPSHOTS = 2
"""The snapshots of prompts that an engine keeps, in those that its slots hold (2)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """The numbers of a request that `begin` takes, all of them data of one program."""

    tokens: np.ndarray  # [n] int32, the prompt
    limit: int  # of prompt and output
    num_drafts: int
    sampling: Sampling  # [1]
    seed: int
    index: int  # is folded into the key
    processors: Processors | None  # [1]
    eos: np.ndarray  # [1, ids] int32
    choice: tuple[int, int]  # among the drafters of the engine; PLAIN: none
    adapter: int  # of a part with Medusa heads; -1 without one
    # Tokens that are expected after `tokens`; they are drafts.
    expected: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    # The last tokens of `tokens` are output that was delivered before: so many.
    delivered: int = 0

    @property
    def uses(self) -> frozenset[int]:
        """The drafters of this row, which read its prompt."""
        return frozenset(self.choice) - {PLAIN}


class Device:
    """Holds the arrays of an engine and its programs.  Only one thread uses it."""

    def __init__(
        self,
        decoder: Decoder,
        params: Params,
        slots: int,
        chunk: int,
        pages: PageSizes | None = None,
    ) -> None:
        several = decoder.proposer
        assert isinstance(several, PerRow)
        self.decoder, self.params, self.slots, self.chunk = decoder, params, slots, chunk
        self.several = several
        self._reader = Reader(decoder.target, several, decoder.capacity, chunk)
        self.pages = pages
        self.pools: list[Pool] = []
        self._joint: Joint[DecodeState] | None = None
        self._at: tuple[NamedSharding | None, ...] | None = None  # where the pools are
        self._places = Shardings.of(params)
        self._empty = jax.jit(lambda params: self._places.reading(self._reading(params)))
        self._read = quick_jit(self._read_on, params, donate_argnums=(1, 2))
        self._read_rows = quick_jit(self._rows_read_on, params, donate_argnums=(1, 2))
        one_cpu = self._places.mesh is None and self._by_token
        self.widths = widths(chunk, one_cpu)  # of passes over a prompt
        self._together = frozenset[int]()  # those of passes that may have several rows
        self._begin = jax.jit(self._begun)  # is traced once, as a part of `_insert`
        self._insert = jax.jit(self._inserted, donate_argnums=0)
        self._layout: tuple[NamedSharding | None, ...] | None = None  # of the batch
        # The turn before may have no news yet when a turn is asked for its own.
        window = 2 * MOST_STEPS * (several.max_depth + 1)
        self._peek = jax.jit(lambda *x: self._places.known(peeked(window, *x)))
        self._recorded = jax.jit(lambda *x: self._places.known(recorded(window, *x)))
        self._copy = jax.jit(self._copied if pages is None else self._first)
        self._snapshot = jax.jit(lambda reading: jax.tree.map(jnp.copy, reading))
        self._copy_page = jax.jit(
            lambda pools, *pages: constrain_like(copied_page(pools, *pages), self._at),
            donate_argnums=0,
        )
        self._clear = jax.jit(
            lambda pools, *pages: constrain_like(cleared(pools, *pages), self._at), donate_argnums=0
        )
        # The sum keeps a table where it was, so that no other program is compiled for it.
        self._tables, self._table = (
            jax.jit(lambda old, table, uses, at=at: at(old * 0 + jnp.where(uses, table, 0)))
            for at in (self._places.rows, self._places.one)
        )
        self._end = jax.jit(lambda done, ended: self._places.rows(done | ended))
        # Of the rows that wait, those that were done before, and those that are.
        self._resumed = jax.jit(lambda *three: self._places.rows(jnp.where(*three)))
        self._decoders = {
            width: dataclasses.replace(decoder, proposer=PerRow(several.parts, width))
            for width in self._widths()
        }
        self._runners: dict[int, Callable[..., DecodeState]] = {}
        self._width = np.zeros(slots, int)  # of the steps of the row in each slot
        self._none = np.zeros(slots, bool)
        self.state: DecodeState | None = None
        self.chunk_seconds = 0.0  # of a pass over a whole chunk of a prompt
        self.turn_seconds = 0.0  # of a turn without a step: what its programs cost to start

    @property
    def _by_token(self) -> bool:
        """Returns whether the time of a pass grows with its tokens, however few there are."""
        return all(device.platform == "cpu" for device in devices_of(self.params.target))

    def _widths(self) -> list[int]:
        """Returns the widths of steps, ascending; the greatest is that of the widest drafter."""
        several = self.several
        cache = self._empty.eval_shape(self.params).cache
        if not self._by_token or cache.widened(several.num_nodes) is None:
            return [several.num_nodes]
        return sorted({1, *(part.num_nodes for part in several.parts)})

    @functools.cached_property
    def copies(self) -> bool:
        """True if the first tokens of a prompt need not be read again."""
        if self.pages is None:
            return self.cuts
        return not self.pages.partly

    @functools.cached_property
    def cuts(self) -> bool:
        """True if the first tokens of a reading can be cut out of it; else snapshots are kept."""
        reading = self._empty.eval_shape(self.params)
        return jax.eval_shape(self._reader.first, reading, np.int32(0)) is not None

    @property
    def snapshots(self) -> int | None:
        """The most snapshots of prompts that are kept; None if none are needed."""
        return SNAPSHOTS * self.slots if self.copies and not self.cuts else None

    @functools.cached_property
    def lags(self) -> list[int]:
        """The last tokens of a copied beginning that each part reads again."""
        assert self.pages is not None
        if not self.copies:
            return [0] * len(self.several.parts)
        count = self.pages.step(self.chunk)
        if self.cuts:
            first = self._copy(self.empty(), np.int32(count))
        else:
            first, every = self.empty(), frozenset(range(len(self.several.parts)))
            for at in range(0, count, self.chunk):
                tokens = np.zeros(min(self.chunk, count - at), np.int32)
                first = self.read(first, tokens, at, self.chunk, every)
        return [max([0, *(count - x.length[0].item() for x in caches(own))]) for own in first.own]

    def start(self, row: Row) -> None:
        """Makes the batch, and compiles every program, with `row` as an example of a request."""
        if self.pages is not None:
            self.pools = jax.jit(self._pools)()
            self._at = layout(self.pools)
        reading = self.empty()
        for width in self.widths:
            reading = self.read(reading, np.zeros(width, np.int32), 0, width, frozenset())
        jax.block_until_ready(reading)
        began = time.perf_counter()
        reading = self.read(reading, np.zeros(self.chunk, np.int32), 0, self.chunk, frozenset())
        jax.block_until_ready(reading)
        self.chunk_seconds = time.perf_counter() - began
        if self.pages is not None and not self.decoder.target.sparse:
            self._together = frozenset(
                width for width in self.widths if 2 * width >= self.chunk and self._is_alike(width)
            )
        begun = self._begin.eval_shape(reading, *self._inputs(row))
        self.state = jax.jit(lambda: self._places.batch(_blank(self.slots, begun)))()
        self._layout = layout(self.state)
        if self.pages is not None:
            table = np.zeros((self.slots, self.pages.of_a_row), np.int32)
            self.place(table, np.ones((self.slots, len(self.several.parts)), bool))
            self.place_reading(reading, table[0])
            self.clear([0])
            if self.copies:
                self.first(reading, 0, table[0])
                self.copy_page(0, 0)
                self.snapshot(reading)
        elif self.copies:
            self.copy(0, 0)
        for slot in range(1, self.slots):
            self.insert(slot, reading, row)
        # Twice on a mesh: XLA may write the shardings of its first results in another way.
        for _ in range(1 if self._places.mesh is None else 2):
            self.insert(0, reading, row)
            if self._places.mesh is not None:
                self.insert(0, reading, row)  # as under load, into what the insert before made
            self.end(np.ones(self.slots, bool))
            for width in self._decoders:
                self._run(width, 1, 1, self._none, self._none)
        nothing = np.zeros(self.slots, np.int32)
        self.peek(nothing, nothing)()
        self.recorded(0, 0)()
        taken = []
        for _ in range(_EMPTY_TURNS):
            began = time.perf_counter()
            self._run(self.several.num_nodes, 1, 1, self._none)  # all rows are done
            self.peek(nothing, nothing)()
            taken.append(time.perf_counter() - began)
        self.turn_seconds = statistics.median(taken)

    def empty(self) -> Reading:
        """Returns the reading of a prompt before its first token."""
        return self._empty(self.params)

    def read(
        self, reading: Reading, tokens: np.ndarray, start: int, width: int, uses: frozenset[int]
    ) -> Reading:
        """Runs one pass over `tokens`, of which the first is at `start`, padded to `width`."""
        chunk = *padded([(start, tokens)], width), self._flags(uses)
        reading, self.pools = self._read(self.params, self.pools, reading, *chunk)
        return reading

    def read_together(
        self,
        readings: list[Reading],
        chunks: list[tuple[int, np.ndarray]],
        width: int,
        uses: frozenset[int],
    ) -> list[Reading]:
        """Runs one pass over a chunk of each of at most `together(width)` prompts.

        Args:
          readings: they are donated.
          chunks: the place of the first token, and the tokens, of each.
          width: of the chunks, as `prompt_passes` gives it.
          uses: the drafters of all of them.
        """
        count = len(readings)
        blank = [self.empty() for _ in range(ROWS - count)]
        nothing = [(0, np.zeros(0, np.int32))] * len(blank)
        given = *padded(chunks + nothing, width), self._flags(uses)
        read, self.pools = self._read_rows(self.params, self.pools, tuple(readings + blank), *given)
        return list(read[:count])

    def together(self, width: int) -> int:
        """Returns how many prompts a pass of this width may read at once."""
        return ROWS if width in self._together else 1

    @functools.cached_property
    def pads(self) -> bool:
        """True if a pass over several prompts costs no more where some of its rows are blank."""
        return any(device.platform != "cpu" for device in devices_of(self.params.target))

    def _is_alike(self, width: int) -> bool:
        """Returns whether passes of several rows give each row the bits of a pass of its own.

        In all of them a token is multiplied with the same weights, and attends to its own row.  But
        XLA chooses the loops of a product by its shape, and with them the order of its sums.
        """
        assert self.pages is not None
        chunks = min(2, self.decoder.capacity // width)
        each = -(-chunks * width // self.pages.page)  # pages of a row
        if ROWS * each > self.pages.count:
            return False
        most = self.decoder.target.vocab_size
        tokens = np.random.default_rng(0).integers(most, size=(chunks, ROWS, width), dtype=np.int32)
        every, pages = frozenset(range(len(self.several.parts))), 1 + np.arange(ROWS * each)
        tables = np.zeros((ROWS, self.pages.of_a_row), np.int32)
        tables[:, :each] = pages.reshape(ROWS, each)

        def bits(together: bool) -> list[bytes]:
            self.clear(pages.tolist())
            readings = [self.place_reading(self.empty(), table) for table in tables]
            for number, chunk in enumerate(tokens):
                at = number * width
                if together:
                    given = [(at, row) for row in chunk]
                    readings = self.read_together(readings, given, width, every)
                else:
                    readings = [
                        self.read(reading, row, at, width, every)
                        for reading, row in zip(readings, chunk, strict=True)
                    ]
            written = jax.tree.map(lambda x: x[1 : 1 + ROWS * each], self.pools)
            return [np.asarray(x).tobytes() for x in jax.tree.leaves((readings, written))]

        return bits(True) == bits(False)

    def place_reading(self, reading: Reading, table: np.ndarray) -> Reading:
        """Returns a reading whose row has the pages `table` [T]."""
        return with_table(reading, lambda old: self._table(old, table, True))

    def first(self, reading: Reading, count: int, table: np.ndarray) -> Reading:
        """Returns the reading of a row after the first `count` tokens of another one's prompt.

        Args:
          reading: of that prompt, or the snapshot after these tokens; it can be used again.
          table: [T], the pages of the row.
        """
        first = self._copy(reading, np.int32(count)) if self.cuts else self.snapshot(reading)
        return self.place_reading(first, table)

    def snapshot(self, reading: Reading) -> Reading:
        """Returns a copy of a reading, without its pages; reading on donates the original."""
        return self._snapshot(reading)

    def clear(self, pages: list[int]) -> None:
        """Writes zeros into pages that were somebody else's."""
        assert self.pages is not None
        most = self.pages.of_a_row
        for start in range(0, len(pages), most):
            some = np.zeros(most, np.int32)
            part = pages[start : start + most]
            some[: len(part)] = part
            self.pools = self._clear(self.pools, some, np.int32(len(part)))

    def copy_page(self, source: int, target: int) -> None:
        """Copies the keys and values of a page."""
        self.pools = self._copy_page(self.pools, np.int32(source), np.int32(target))

    def place(self, tables: np.ndarray, uses: np.ndarray) -> None:
        """Gives the rows of the batch their pages.

        Args:
          tables: [slots, T] int32.
          uses: [slots, parts] bool; a row has no pages in the caches of another part, so it can
            neither read nor write there what belongs to others.
        """
        state = self.state
        assert state is not None
        whole = np.ones((self.slots, 1), bool)
        cache = with_table(state.cache, lambda old: self._tables(old, tables, whole))
        own = tuple(
            with_table(part, lambda old, n=n: self._tables(old, tables, uses[:, n : n + 1]))
            for n, part in enumerate(state.proposer.own)
        )
        proposer = dataclasses.replace(state.proposer, own=own)
        self.state = dataclasses.replace(state, cache=cache, proposer=proposer)

    def copy(self, slot: int, count: int) -> Reading:
        """Returns the first `count` tokens of the prompt of a slot, as a row of its own."""
        assert self.state is not None
        several = self.state.proposer
        held = Reading(self.state.cache, several.own, several.ends)
        return self._copy(held, np.int32(slot), np.int32(count))

    def check_memory(self, row: Row) -> None:
        """Raises ValueError if a batch cannot fit, before anything is compiled.

        The bytes needed are those of the batch, of a row outside of it and of the prompts that are
        read next, and of the logits of one step.  The parameters are already allocated.

        Args:
          row: an example of a request.

        Raises:
          ValueError: with the bytes that are needed on a device, the bytes free, and the cure.
        """
        # The programs reuse these traces.
        reading = self._empty.eval_shape(self.params)
        one = self._begin.eval_shape(reading, *self._inputs(row))
        batch = jax.eval_shape(lambda: self._places.batch(_blank(self.slots, one)))
        mesh, several = self._places.mesh, self.several
        logits = self.slots * several.num_nodes * self.decoder.target.vocab_size * 4
        logits //= 1 if mesh is None else mesh.size if self._places.target else row_parts(mesh)
        needed = device_bytes(batch, mesh) + device_bytes((one, reading), None) + logits
        what = f"{self.slots} slots with a capacity of {self.decoder.capacity} tokens"
        smaller = "a smaller capacity="
        if self.pages is not None:
            needed += device_bytes(jax.eval_shape(self._pools), None)
            needed += (ROWS - 1) * device_bytes(reading, None)  # what has no pages
            tokens = self.pages.count * self.pages.page
            what, smaller = f"{what} and caches of {tokens}", "a smaller cache_tokens="
            if self.snapshots is not None:
                needed += self.snapshots * device_bytes(reading, None)
        cure = (
            f"make the engine with fewer slots=, {smaller} or fewer drafters, load the "
            "models in bfloat16, or split them over several devices with mesh="
        )
        require(needed, devices_of(self.params.target), what, cure)

    def _inputs(self, row: Row) -> tuple[object, ...]:
        prompt = np.zeros((1, self.decoder.capacity), np.int32)
        prompt[0, : len(row.tokens)] = row.tokens
        numbers = (
            len(row.tokens), row.limit, row.num_drafts, row.index, row.adapter, row.delivered,
        )  # fmt: skip
        expected = None
        if self.several.aligned is not None:
            expected = expected_document(row.expected, self.decoder.capacity)
        choice = self.several.chosen(row.choice, len(row.expected) > 0)
        return (
            prompt,
            np.array(numbers, np.int32),
            np.uint32(row.seed),
            np.array([choice], np.int32),
            (row.sampling, row.processors, row.eos),
            expected,
        )

    def parts_of(self, row: Row) -> list[int]:
        """Returns the proposers whose drafts a row takes."""
        choice = self.several.chosen(row.choice, len(row.expected) > 0)
        return [part for part in choice if part != PLAIN]

    def insert(self, slot: int, reading: Reading, row: Row) -> None:
        """Puts a row whose prompt is read into a slot."""
        assert self.state is not None
        given = reading, *self._inputs(row)
        self.state = self._insert(self.state, np.int32(slot), *given)
        needed = max([1, *(self.several.parts[part].num_nodes for part in self.parts_of(row))])
        self._width[slot] = min(width for width in self._decoders if width >= needed)

    def end(self, ended: np.ndarray) -> None:
        """Stops the rows where `ended` [slots] is True."""
        assert self.state is not None
        self.state = dataclasses.replace(self.state, done=self._end(self.state.done, ended))

    def run(self, steps: int, live: np.ndarray, least: int, present: np.ndarray) -> None:
        """Runs a few steps of the rows in the slots `live` [slots].

        Args:
          steps: at most so many.
          live: their slots.
          least: so many once one of these rows is done.
          present: [slots] these slots, and those of rows that may be done or not.  Such a row
            takes steps with the live rows of its width; without any it stays as it is, since a step
            of another width would change its bits.
        """
        for width in sorted(set(self._width[live].tolist())):
            own = self._width == width
            others = present & ~own
            self._run(width, steps, least, live & own, others if others.any() else None)

    def _run(
        self,
        width: int,
        steps: int,
        least: int,
        watched: np.ndarray,
        waiting: np.ndarray | None = None,
    ) -> None:
        """Runs steps of one width, as `run`.  Rows that are `waiting` [slots] stay as they are."""
        state = self.state
        assert state is not None
        done = state.done
        if waiting is not None:
            state = dataclasses.replace(state, done=self._end(done, waiting))
        if self.pages is not None:
            self._joint = self._joint or Joint(state, self.pools)
            state = self._joint.join(state, self.pools)
        if width not in self._runners:
            self._runners[width] = self._decoders[width].runner(self.params, state)
        until = np.array(least, np.int32), watched
        state = self._runners[width](self.params, state, steps, until)
        if self._joint is not None:
            state, self.pools = self._joint.part(state)
        if waiting is not None:
            state = dataclasses.replace(state, done=self._resumed(waiting, done, state.done))
        self.state = state

    def peek(self, length: np.ndarray, written: np.ndarray) -> Callable[[], list[News]]:
        """Asks for the new tokens of each slot, given the numbers of those that are already known.

        Returns:
          A function that waits until the device has finished, and returns them.
        """
        state = self.state
        assert state is not None
        packed = self._peek(
            (state.tokens, state.length, state.done, state.stats, state.proposer), length, written
        )
        return lambda: news_of(np.asarray(packed), length)

    def recorded(self, slot: int, start: int) -> Callable[[], Logprobs | None]:
        """Asks for the log-probabilities of the new tokens of a slot, as `peek` for the tokens.

        Args:
          slot: its number.
          start: the tokens of its text that are known already, with the prompt.

        Returns:
          A function that waits for them, and for others behind them; None without any.
        """
        assert self.state is not None
        if self.state.logprobs is None:
            return lambda: None
        asked = self._recorded(self.state.logprobs, np.int32(slot), np.int32(start))
        return lambda: jax.device_get(asked)

    def tell(self) -> None:
        """Lets other processes know what was decided; here there are none."""

    def compiled(self) -> int:
        """The number of programs that were compiled for this engine so far, except for `run`."""
        programs = (
            self._empty, self._read, self._read_rows, self._insert, self._peek, self._recorded,
            self._copy, self._end, self._resumed, self._copy_page, self._clear,
            self._tables, self._table, self._snapshot,
        )  # fmt: skip
        return sum(cast(Any, program)._cache_size() for program in programs)

    def _flags(self, uses: frozenset[int]) -> np.ndarray:
        return np.array([n in uses for n in range(len(self.several.parts))], bool)

    def _copied(self, held: Reading, slot: Array, count: Array) -> Reading:
        def cut(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, slot, 1, axis=0)

        first = self._reader.first(jax.tree.map(cut, held), count)
        assert first is not None  # `copies`
        return self._places.reading(first)

    def _first(self, reading: Reading, count: Array) -> Reading:
        first = self._reader.first(reading, count)
        assert first is not None  # `copies`
        return first

    def _read_on(
        self, params: Params, pools: list[Pool], reading: Reading, *chunk: Array
    ) -> tuple[Reading, list[Pool]]:
        read = self._reader.read(params, with_pages(reading, pools), *chunk)
        reading, pools = without_pages(read)
        return self._places.reading(reading), constrain_like(pools, self._at)

    def _rows_read_on(
        self, params: Params, pools: list[Pool], readings: tuple[Reading, ...], *chunk: Array
    ) -> tuple[tuple[Reading, ...], list[Pool]]:
        whole = jax.tree.map(lambda *x: jnp.concatenate(x), *readings)
        read, pools = self._read_on(params, pools, whole, *chunk)
        rows = range(len(readings))
        return tuple(jax.tree.map(lambda x, n=n: x[n : n + 1], read) for n in rows), pools

    def _reading(self, params: Params) -> Reading:
        """Returns the reading of a row before its prompt."""
        reading = self._reader.empty(params)
        return reading if self.pages is None else self.pages.split(reading)

    def _pools(self) -> list[Pool]:
        assert self.pages is not None
        reading, places = jax.eval_shape(self._reader.empty, self.params), self._places
        parts = [(reading.cache, places.target)]
        parts += [(reading.own[n], places.parts[n]) for n in self.pages.parts]
        pools = []
        for part, split in parts:
            made = pools_of(part, self.pages.page, self.pages.count + 1)
            pools += shard_pages(made, places.mesh, split)
        return pools

    def _begun(
        self,
        reading: Reading,
        prompt: Array,
        numbers: Array,
        seed: Array,
        choice: Array,
        settings: tuple[Sampling, Processors | None, Array],
        expected: Array | None,
    ) -> DecodeState:
        length, limit, num_drafts, index, adapter, delivered = numbers
        sampling, processors, eos = settings
        own = [
            part.adapt(state, adapter[None])
            for part, state in zip(self.several.parts, reading.own, strict=True)
        ]
        if self.several.aligned is not None:
            assert expected is not None
            begun = self.several.expecting(expected, prompt, length[None] - 1)
            own[self.several.aligned] = begun
        several = self.several.state(tuple(own), 1, self.decoder.capacity)
        several = dataclasses.replace(several, choice=choice, ends=reading.ends)
        state = begin(
            self.decoder,
            reading.cache,
            several,
            RowInputs(
                prompt,
                length[None],
                limit=limit[None],
                num_drafts=num_drafts[None],
                sampling=sampling,
                key=jax.random.fold_in(make_key(seed), index)[None],
                processors=None,
                eos=eos,
            ),
        )
        if processors is not None:
            processors = self._observed(processors, prompt, length - delivered, delivered, eos)
            state = dataclasses.replace(state, processors=processors)
        return self._places.row(state)

    def _inserted(
        self, state: DecodeState, slot: Array, reading: Reading, *inputs: Any
    ) -> DecodeState:
        return put_row(self._layout, state, slot, self._begin(reading, *inputs))

    def _observed(
        self, processors: Processors, text: Array, start: Array, count: Array, eos: Array
    ) -> Processors:
        """Returns the processors of a row after `count` tokens of output behind its prompt.

        Args:
          processors: from `Processors.create`.
          text: [1, T], prompt and output.
          start: [], tokens of the prompt.
          count: [], mostly 0.
          eos: as in `RowInputs`.
        """
        size = self.decoder.target.vocab_size
        begun = processors.begin(text, start[None], size, False, eos)

        def turn(carry: tuple[Array, Processors]) -> tuple[Array, Processors]:
            output = jnp.roll(text, -start, axis=1)
            return jnp.zeros_like(carry[0]), carry[1].observe(output, count[None])

        begun = jax.tree.map(jnp.asarray, begun)
        return jax.lax.while_loop(lambda carry: carry[0], turn, (count > 0, begun))[1]


def _blank(slots: int, row: DecodeState) -> DecodeState:
    """Returns a batch of `slots` rows with the shapes of `row`, in which all numbers are 0."""
    return jax.tree.map(lambda x: jnp.zeros((slots, *x.shape[1:]), x.dtype), row)
