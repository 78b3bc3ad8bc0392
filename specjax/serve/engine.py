"""`Engine`: serves requests in a batch of fixed shape, so that no text depends on other requests.

    submit -> queue -> read the prompt, a chunk a turn -> slot of the batch -> handle

One thread owns the device.  Each of its turns reads a few chunks of prompts and then runs a few
steps of the batch, so a long prompt delays the texts of others by little at a time.

No text depends on others, because every pass has a fixed shape, rows do not mix in any operation,
the noise of a token is keyed by the seed and the position, and the chunks of a prompt follow from
its length.  `tests/core/test_serve.py` tests that, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import jax
import numpy as np

from specjax._internal.checks import flag, items, settle, shown, typed, whole
from specjax.contract import Rule
from specjax.decoding import Decoder
from specjax.generation import Request
from specjax.methods import Drafter
from specjax.models import LanguageModel
from specjax.parallel import mesh_of, row_parts
from specjax.proposers import Aligned
from specjax.rules import Match, SyntheticAcceptance
from specjax.serve.admission import BOTH, NONE, Admitted, Checker, Loaded, load_all
from specjax.serve.batch import Device
from specjax.serve.decisions import Leader, Receiver, connected, follow
from specjax.serve.handle import Handle
from specjax.serve.identity import model_hash
from specjax.serve.page_sizes import PAGE, PAGES, PageSizes
from specjax.serve.per_row import PLAIN, Limits, PerRow
from specjax.serve.reading import Reader
from specjax.serve.releasing import CACHES, PARTS, WEIGHTS, take_arrays, take_caches, twins
from specjax.serve.resuming import Delivered
from specjax.serve.scheduler import Admission, Load, Scheduler
from specjax.types import Params

CHUNK = 128
"""The most tokens of a prompt that are read between two steps of the batch."""

_EOS_IDS = 4

_PAUSES = ("abort", "retract", "in_place")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of the caches of an engine."""

    size: int  # tokens
    count: int


class Engine:
    """Serves requests for texts of one target, each with a drafter of its own.

    Threads may share it.  `with Engine(...) as engine` closes it at the end.

    Example:
      >>> with Engine(target, {"draft": specjax.make_drafter(target, draft)}) as engine:
      ...     text = engine.submit(specjax.Request(prompts="def main(", seed=1)).result().text
    """

    def __init__(
        self,
        target: LanguageModel,
        drafters: Mapping[str, Drafter] | None = None,
        *,
        slots: int = 8,
        capacity: int = 2048,
        waiting: int = 64,
        chunk: int = CHUNK,
        logprobs: int | None = None,
        default: str | None = None,
        constraint_size: tuple[int, int] | None = None,
        cache_tokens: int | None = None,
        page: int = PAGE,
        expected: int | None = None,
        synthetic_acceptance: SyntheticAcceptance | None = None,
        drafts_by_context: Mapping[str, Mapping[int, int]] | None = None,
    ) -> None:
        """Compiles all programs, and starts to serve.

        Args:
          target: from `specjax.load`; with mesh= it is served from several devices of one process.
          drafters: the drafters of requests, by name.
          slots: the rows of the batch; on a mesh a multiple of the devices along `data`.
          capacity: the most tokens of a prompt with its output.
          waiting: the most requests that wait for a slot; more are refused at once.
          chunk: the most tokens of a prompt that are read between two steps of the batch.
          default: the drafter of requests that name none, or two as "first+second"; "none" is
            plain decoding, and None the first drafter.
          constraint_size: the most states of a request's constraint, and the most classes of its
            tokens, which cost time in every step; None refuses constraints.
          logprobs: record log-probabilities, and those of this many most probable tokens; None
            records nothing.
          cache_tokens: the tokens whose keys and values all slots hold together, in pages that
            go where they are needed; None: each slot has room for `capacity` tokens.  If pages
            run out, the youngest request waits, and its text goes on later.  Not over several
            processes.
          page: the tokens of a page, 16, 32, 64 or 128.
          expected: the most drafts of a step that are tokens of a request's `expected`, or of the
            text that it resumes.  None refuses `expected`, costs nothing, and a text is resumed
            without these drafts.  A number above the depths of the drafters makes passes wider: on
            a CPU those of requests with expected texts, elsewhere all.
          synthetic_acceptance: for measurements alone: drafts are accepted as it says, right or
            wrong.  Texts are worthless, and `model_hash` begins with "synthetic-".
          drafts_by_context: the most drafts of a step, by the name of a drafter and the tokens of
            the text: {"draft": {4096: 4, 8192: 0}} drafts nothing in texts above 4096 tokens.  The
            last number is that of all longer texts.  The text stays the same.

        Raises:
          ValueError: a number or a drafter that cannot be used, or too little free memory.
        """
        typed("what specjax.load(folder) returns", LanguageModel, target=target)
        for name, value, least in (
            ("slots", slots, 1), ("capacity", capacity, 2), ("waiting", waiting, 0),
            ("chunk", chunk, 1),
        ):  # fmt: skip
            whole(name, value, least, 2**24, f"a whole number of at least {least}")
        most = target.model.vocab_size
        if logprobs is not None:
            whole("logprobs", logprobs, 0, most, f"a whole number in [0, {most}], or None")
        typed("a dict from names to drafters", Mapping | None, drafters=drafters)
        _check_mesh(target, slots)
        if cache_tokens is not None:
            whole("cache_tokens", cache_tokens, 1, 2**40, "a whole number of tokens, or None")
            settle((
                _is_spread(target),
                f"cache_tokens={cache_tokens}: an engine over several processes has no pages; "
                "leave it out, and each slot has room for capacity= tokens",
            ))  # fmt: skip
        if expected is not None:
            whole("expected", expected, 1, 254, "a whole number in [1, 254], or None")
        settle((page not in PAGES, f"page={shown(page)}; pass one of 16, 32, 64 and 128"))
        loaded = load_all(target, drafters or {})
        rule = _rule(synthetic_acceptance, constraint_size, expected, loaded)
        chunk = min(chunk, capacity)
        room = min(capacity, target.model.max_positions + 1)
        num_eos = -(-max(_EOS_IDS, len(target.eos)) // _EOS_IDS) * _EOS_IDS
        size = None if constraint_size is None else _size(constraint_size)
        names = [part.name for part in loaded]
        if default not in (None, NONE) and not set(str(default).split(BOTH)) <= set(names):
            listed = ", ".join([NONE, *names])
            raise ValueError(
                f"default={shown(default)} is not a drafter; pass one of {listed}, or two as "
                f"first{BOTH}second"
            )
        self._exact = rule.exact
        self.checker = Checker(target, loaded, room, logprobs, num_eos, default, size, expected)
        aligned = () if expected is None else (Aligned(expected, agreed=True),)
        several = PerRow((*(part.drafter.proposer for part in loaded), *aligned))
        decoder = Decoder(
            target.model, several, rule, target.eos, -(-capacity // chunk) * chunk, None,
            logprobs,
        )  # fmt: skip
        own = tuple(_arrays(part, target) for part in loaded)
        limits = _limits(drafts_by_context, loaded, len(aligned))
        params = Params(target.params, own + (None,) * len(aligned) + limits)
        pages = None
        if cache_tokens is not None:
            reader = Reader(target.model, several, decoder.capacity, chunk)
            pages = PageSizes.of(reader, params, page, cache_tokens, target.name)
        self._page = page
        self._leader: Leader | None = None
        self._device = Device(decoder, params, slots, chunk, pages)
        example = self.checker.admit(
            Request(prompts=[[0, 0]], max_new_tokens=1, proposer=NONE, eos=[])
        ).row
        self._device.check_memory(example)
        self._device.start(example)
        self._follower: Receiver | None = None
        device = self._device
        if _is_spread(target):
            self.model_hash  # noqa: B018 - all processes together
            link = connected(jax.process_index())
            if isinstance(link, Receiver):
                self._follower = link
                return
            self._leader = Leader(device, link)
            device = cast(Device, self._leader)
        self._scheduler = Scheduler(device, waiting)
        self._released: dict[str, Callable[[], None]] = {}  # what brings each part back
        self._goes_on = True  # once all memory is there; False while it is paused

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(finish=error[0] is None)

    @property
    def target(self) -> LanguageModel:
        """The model that is served."""
        return self.checker.target

    @property
    def drafters(self) -> tuple[Loaded, ...]:
        """The names of the drafters that requests may use."""
        return self.checker.loaded

    @property
    def max_depth(self) -> int:
        """The most drafts on a path, over all drafters."""
        return self._device.several.max_depth

    @property
    def follows(self) -> bool:
        """True in the processes that do what process 0 decides: they only `follow`."""
        return self._follower is not None

    def follow(self) -> None:
        """Does what the engine of process 0 decides, until that is closed.

        Of a target over several processes each makes an engine with the same arguments.  Process 0
        uses its own as any other, and the others call this.

        Raises:
          Diverged: this process missed a decision, or sees other tokens.
          ValueError: this engine decides itself.

        Example:
          >>> if engine.follows:
          ...     engine.follow()
        """
        if self._follower is None:
            raise ValueError("this engine decides itself: submit requests to it")
        follow(self._device, self._follower)

    def submit(
        self,
        request: Request | Admitted,
        index: int = 0,
        cache_salt: str | None = None,
        *,
        resume: Sequence[int] | Delivered | None = None,
        fast: bool = False,
    ) -> Handle:
        """Queue a request of a single prompt.

        Args:
          request: `proposer` is the name of a drafter of this engine, "none" for plain decoding, or
            two names as "first+second": a step drafts with the first where that has drafts, and
            else with the second.  `adapter` is a name in one of their banks; without `proposer` it
            chooses the drafter that has it, unless the one by default does.  What `checker.admit`
            returned for a request may be submitted often, and is not checked again.
          index: texts of one seed and prompt differ by this number, as rows of `generate` do.
          cache_salt: beginnings of prompts are copied between requests of the same value only, so
            that nobody learns the prompts of others from the times of his own.
          resume: the first tokens of the text of this request, which a client has already, such as
            from an engine that has failed.  They are written again, as drafts where the engine has
            room for `expected`, and the handle gives what comes after them.  If they differ from
            what is written now, the handle raises `Disagreement` instead.  `result()` has the whole
            text.
          fast: read these tokens with the prompt instead of writing them.  Nobody compares them, so
            it must be sure that the same weights wrote them.  Their keys and values are rounded as
            those of a prompt: in float32 the text goes on as it was unless two tokens nearly tie,
            in bfloat16 it forks more often.  They have no log-probabilities (NaN) and no guesses.

        Raises:
          ValueError: a field that cannot be used; the message has the fix.
          Busy: too many requests are waiting.
          Closed: the engine was closed.
        """
        if self._follower is not None:
            raise ValueError("requests go to the engine of process 0: call follow() in this one")
        self._scheduler.check_open()
        if resume is not None and not self._exact:
            raise ValueError(
                "resume= goes on with a text that the target wrote, and this engine accepts drafts "
                "whatever they are (synthetic_acceptance=): leave it out"
            )
        admitted = request if isinstance(request, Admitted) else self.checker.admit(request)
        typed("a text, or None", str | None, cache_salt=cache_salt)
        index = whole("index", index, 0, 2**31 - 1, "a whole number, 0 or greater")
        delivered, trusted = Delivered(), False
        if resume is not None:
            admitted, delivered, trusted = self.checker.resumed(
                admitted, resume, flag("fast", fast)
            )
        elif fast:
            raise ValueError("fast=True is for a text that is resumed: pass its tokens as resume=")
        row, prepared = dataclasses.replace(admitted.row, index=index), admitted.prepared
        names = [None if part == PLAIN else self.drafters[part].name for part in row.choice]
        if self.checker.expected is not None:
            names = ["expected", *names]
        handle = Handle(
            prepared.texts, tuple(names), len(row.tokens) - row.delivered, admitted.logprobs,
            delivered, row.seed, index,
        )  # fmt: skip
        if trusted:
            handle.trust()
        self._scheduler.put(Admission(row, prepared, handle, cache_salt))
        return handle

    @functools.cached_property
    def model_hash(self) -> str:
        """A hash of the target's weights, configuration and tokenizer, made when it is first asked.

        Engines of one hash write one text for one request.
        """
        return ("" if self._exact else "synthetic-") + model_hash(self.target)

    def pause(self, mode: str = "abort") -> int:
        """Stops decoding until `go_on`; requests that come wait in the queue.

        Args:
          mode: what happens to the requests that run.  "abort" cancels them and those that wait;
            "retract" puts them back into the queue, from which they are read again and go on as
            they were; "in_place" leaves them in their slots.

        Returns:
          The number of requests that there were.
        """
        settle((mode not in _PAUSES, f"mode={shown(mode)}; pass one of {', '.join(_PAUSES)}"))

        def pause() -> int:
            self._goes_on = False
            return self._scheduler.pause(mode)

        return self._scheduler.call(pause)

    def go_on(self) -> None:
        """Ends a pause; while memory is released, requests still wait for that."""

        def go_on() -> None:
            self._goes_on = True
            if not self._released:
                self._scheduler.go_on()

        self._scheduler.call(go_on)

    def release_memory(self, parts: Sequence[str] = PARTS) -> None:
        """Gives the memory of its arrays back until `resume_memory`; requests wait until then.

        A trainer on the same devices has the memory for its step.  Caches are forgotten, and
        nothing is compiled when they come again.  The target's weights go to the host's memory, and
        the arrays of the model that this engine was made with, or that `update_weights` brought
        last, are deleted, whoever holds them; on a CPU this frees nothing.  Drafters keep their
        weights, also those that are the target's arrays, as with `window_draft(target, 512)`.

        Args:
          parts: "kv_cache", "weights" or both.  What is released already stays so.

        Raises:
          ValueError: another part, requests have a slot, or an engine over several processes.
        """
        _check_parts(parts)
        settle((_is_spread(self.target), "an engine over several processes keeps its memory"))

        def take_weights() -> Callable[[], None]:
            self.model_hash  # noqa: B018 - it reads the weights, and stays
            target = self.target
            other = dataclasses.replace(target, params=twins(target.params))
            held = jax.tree.leaves([_arrays(part, other) for part in self.drafters])
            again = take_arrays(target.params, {id(leaf) for leaf in held})
            return lambda: self._take(dataclasses.replace(target, params=again()))

        takes = {CACHES: lambda: take_caches(self._device), WEIGHTS: take_weights}

        def release() -> None:
            self._scheduler.flush()
            for part in PARTS:
                if part in parts and part not in self._released:
                    self._released[part] = takes[part]()
                    self._scheduler.pause("in_place")

        self._scheduler.call(release)

    def resume_memory(self, parts: Sequence[str] = PARTS) -> None:
        """Takes back memory that was released: caches are empty, and weights as they were.

        When all is back the engine goes on, unless it is paused.  `update_weights` may follow on
        the weights, before the caches are back.

        Raises:
          ValueError: another part.
        """
        _check_parts(parts)

        def resume() -> None:
            for part in PARTS:
                if part in parts and part in self._released:
                    self._released[part]()
                    del self._released[part]
                    if not self._released and self._goes_on:
                        self._scheduler.go_on()

        self._scheduler.call(resume)

    def flush(self) -> None:
        """Forgets the prompts from which later ones could copy their beginning.

        Raises:
          ValueError: requests have a slot.
        """
        self._scheduler.call(self._scheduler.flush)

    def update_weights(self, target: LanguageModel) -> None:
        """Takes the weights of another checkpoint of the target; nothing is compiled.

        Copies of prompts are forgotten, and requests that wait are decoded with the new weights.
        After `pause("retract")` texts that had begun keep their tokens, which the old weights
        wrote, and go on with the new ones: such a text is no sample of either.

        Raises:
          ValueError: requests have a slot, or the arrays differ from the target's in their names,
            shapes or types.
        """
        typed("what specjax.load(folder) returns", LanguageModel, target=target)
        settle((
            _is_spread(self.target),
            f"{self.target.name} is on several processes, which take new weights only when they "
            "start",
        ))  # fmt: skip
        _check_alike(self.target.params, target.params)
        new = dataclasses.replace(self.target, params=target.params, folder=target.folder)

        def replace() -> None:
            self.check_weights()
            self._take(new)
            self.__dict__.pop("model_hash", None)

        self._scheduler.call(lambda: self._scheduler.renew(replace))

    def _take(self, target: LanguageModel) -> None:
        """Decodes with these weights from now on."""
        device = self._device
        own = tuple(_arrays(part, target) for part in self.drafters)
        device.params = Params(target.params, own + device.params.proposer[len(own) :])
        self.checker = dataclasses.replace(self.checker, target=target)

    def check_weights(self) -> None:
        """Raises ValueError while the weights are released: others would need their memory."""
        settle((
            WEIGHTS in self._released,
            "the memory of the weights is released: call resume_memory(), or send "
            "/resume_memory_occupation, before",
        ))  # fmt: skip

    @property
    def blocks(self) -> Blocks:
        """What prompts share of each other: chunks of slots, or pages."""
        load, device = self.load(), self._device
        if load.pages:
            return Blocks(self._page, load.pages)
        return Blocks(device.chunk, device.slots * device.decoder.capacity // device.chunk)

    def load(self) -> Load:
        """Returns the load of the engine: the requests that wait and run, and the counts so far."""
        return self._scheduler.load()

    @property
    def healthy(self) -> bool:
        """True if the engine still serves the requests that it has accepted."""
        return self._scheduler.healthy

    def compiled(self) -> int:
        """The number of programs that this engine has compiled; it is constant after the start."""
        return self._device.compiled()

    def close(self, finish: bool = True, timeout: float | None = None) -> None:
        """Refuses new requests, and stops.

        Args:
          finish: serve the accepted requests first; else they end with `Closed`.
          timeout: the most seconds to wait; the remaining requests then end with `Closed`.
        """
        if self._follower is not None:
            return
        # What waits cannot be served without memory.
        self._scheduler.close(finish and not self._released, timeout)
        if self._leader is not None:
            self._leader.stop()
            self._leader = None


def _check_parts(parts: Sequence[str]) -> None:
    other = [part for part in parts if part not in PARTS]
    settle((
        isinstance(parts, str) or bool(other),
        f"parts={shown(parts)}; pass a list of {' and '.join(PARTS)}",
    ))  # fmt: skip


def _is_spread(target: LanguageModel) -> bool:
    """Returns whether the devices of a target belong to several processes."""
    mesh = mesh_of(target.params)
    devices = [] if mesh is None else mesh.devices.flat
    return len({device.process_index for device in devices}) > 1


def _rule(
    synthetic: SyntheticAcceptance | None,
    constraint_size: tuple[int, int] | None,
    expected: int | None,
    loaded: Sequence[Loaded],
) -> Rule:
    """Returns the rule of an engine, or raises ValueError for a synthetic one that does not fit."""
    if synthetic is None:
        return Match()
    typed("a specjax.SyntheticAcceptance", SyntheticAcceptance, synthetic_acceptance=synthetic)
    for name, value in (("constraint_size", constraint_size), ("expected", expected)):
        if value is not None:
            raise ValueError(
                f"synthetic_acceptance= accepts drafts whatever they are, and {name}="
                f"{shown(value)} cannot hold then: pass {name}=None"
            )
    synthetic.check_depth(max((p.drafter.proposer.max_depth for p in loaded), default=0))
    return synthetic.constant()


def _limits(
    given: Mapping[str, Mapping[int, int]] | None, loaded: Sequence[Loaded], others: int
) -> tuple[Limits, ...]:
    """Returns the limits of all drafters, and of `others` more parts that have none; or ()."""
    typed("a dict from names of drafters", Mapping | None, drafts_by_context=given)
    if not given:
        return ()
    names, most = [part.name for part in loaded], 2**31 - 1
    for name, table in given.items():
        settle((
            name not in names,
            f"drafts_by_context has the name {shown(name)}; the drafters are {', '.join(names)}",
        ))  # fmt: skip
        called = f"drafts_by_context[{name!r}]"
        typed("a dict from tokens to drafts", Mapping, **{called: table})
        settle((not table, f"{called} is empty: leave it out"))
        for context, drafts in table.items():
            whole(f"a context of {called}", context, 1, most, "a whole number above 0")
            whole(f"{called}[{context}]", drafts, 0, most, "a whole number, 0 or greater")
        numbers = [table[context] for context in sorted(table)]
        settle((
            any(before == 0 < after for before, after in itertools.pairwise(numbers)),
            f"{called}={shown(table)} drafts again after no drafts: the drafter has not read that "
            "text, so pass 0 for all longer texts",
        ))  # fmt: skip
    contexts = sorted({context for table in given.values() for context in table})
    drafts = np.full((len(contexts), len(names) + others), most, np.int32)
    for name, table in given.items():
        for row, context in enumerate(contexts):
            at = min((c for c in table if c >= context), default=max(table))
            drafts[row, names.index(name)] = table[at]
    return (Limits(jax.device_put(np.array(contexts, np.int32)), jax.device_put(drafts)),)


def _check_mesh(target: LanguageModel, slots: int) -> None:
    mesh = mesh_of(target.params)
    if mesh is None:
        return
    parts = row_parts(mesh)
    settle(
        (
            slots % parts,
            f"slots={slots} do not divide among the {parts} devices along the mesh axis of rows: "
            f"pass slots={slots + -slots % parts}",
        ),
    )


def _check_alike(old: object, new: object) -> None:
    """Raises ValueError if two trees of weights differ in names, shapes or types of arrays."""

    def kinds(tree: object) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): f"{x.shape} {x.dtype}" for path, x in leaves}

    one, other = kinds(old), kinds(new)
    for name in [*one, *other]:
        if one.get(name) != other.get(name):
            raise ValueError(
                f"the weights{name} are {other.get(name, 'absent')}, and those of the engine "
                f"{one.get(name, 'absent')}: pass a checkpoint of the same model, loaded with the "
                "same dtype and keep_bfloat16 (`specjax serve --admin` keeps no bfloat16)"
            )


def _arrays(part: Loaded, target: LanguageModel) -> object:
    """Returns the parameters of a drafter; each row chooses its adapter later."""
    return part.drafter.arrays(target, 1, part.adapters[0] if part.adapters else None)


def _size(given: object) -> tuple[int, int]:
    values = items(given) or []
    if len(values) != 2:
        raise ValueError(f"constraint_size={shown(given)}; pass states and classes, as (512, 256)")
    wanted = "states and classes of at least 1"
    states, classes = (whole("constraint_size", value, 1, 2**20, wanted) for value in values)
    return states, classes
