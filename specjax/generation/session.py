"""`Session`: calls that are turns of one text, whose cache stays between them.

    turn 1    system, question                     read 40, written 30
    turn 2    system, question, answer, question   kept 69, read 12, written 25

A turn gets the whole text, as a call of `generate` would, and reads only what the cache does not
hold.  So an edited or a repeated turn needs no other call: the common beginning is kept.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Unpack, overload

import numpy as np

from specjax._internal.checks import settle, shown, typed, whole
from specjax.constraints import Grammar
from specjax.decoding import WIDEST_TURN, Decoder, Held, RowInputs, Turns
from specjax.drafters import on_demand
from specjax.generation.prepared import Prepared, capacity_for, prepare
from specjax.generation.request import Options, Prompts, load_named, make_request
from specjax.generation.run import Output, TextStream, decode
from specjax.generation.warmup import Ready, place, warm_up
from specjax.models import LanguageModel
from specjax.parallel import mesh_of
from specjax.sampling import folded_keys, keys_of_rows
from specjax.types import DecodeState

_FIXED = (
    "drafter", "draft", "draft_dtype", "draft_window", "proposer", "speculative_config",
    "documents", "adapter", "rule", "synthetic_acceptance", "num_drafts", "logits_processor",
    "logprobs",
)  # fmt: skip
"""Options of all turns: the caches were made for them."""

_SNAPSHOTS = 32
"""The most copies of a state that cannot be cut: a turn makes one of its prompt and one of all."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Turn(Ready):
    """A request of a session, which goes on from what the session holds."""

    session: Session = dataclasses.field(kw_only=True)
    number: int = dataclasses.field(kw_only=True)

    def prefill(self, endless: bool = False) -> DecodeState:
        del endless
        return self.session._begin(self)

    def ended(self, state: DecodeState) -> None:
        self.session._end(self, state)


class Session:
    """Decodes a text that comes in turns, such as a chat, and reads only what is new of it.

    The text of a turn is that of `generate` for the whole conversation.  The answers in the cache
    were read as they were written, a few tokens at a time, so their numbers are rounded otherwise
    than those of a prompt: in float32 a token differs only where two nearly tie.

    Keys and values are cut where a text is edited.  The states of recurrent layers, the rings of
    sliding windows and drafters that read features cannot be cut.  Of those a session holds copies
    of the last 32 ends of prompts and answers, which take memory beside the cache.

    Attributes:
      kept: the tokens of the last turn's prompt that were in the cache already.
      read: the tokens of it that the target has read; the last one is read with the first draft.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> session = specjax.Session(target, capacity=256, proposer="ngram")
      >>> first = session.generate([[5, 6, 7, 8]], max_new_tokens=8)
      >>> second = session.generate([[5, 6, 7, 8, *first.tokens[0], 9]], max_new_tokens=8)
      >>> session.kept, session.read
      (11, 1)
    """

    def __init__(self, target: LanguageModel, *, capacity: int = 4096, **options: Any) -> None:
        """Checks the options; the first turn compiles.

        Args:
          target: from `specjax.load`, on one device.
          capacity: the most tokens of a text, prompt and output.
          **options: fields of `specjax.Request` for every turn: how to draft, the rule, and
            settings that a turn may change.

        Raises:
          ValueError: an option that cannot be used.
        """
        typed("what specjax.load(folder) returns", LanguageModel, target=target)
        whole("capacity", capacity, 2, 2**24, "a whole number of at least 2")
        most = target.model.max_positions
        mesh = mesh_of(target.params)
        given = [name for name in ("prompts", "messages", "stream") if name in options]
        settle(
            (
                capacity > most,
                f"capacity={capacity}, and {target.name} reads at most {most} tokens: pass "
                f"capacity={most} or less",
            ),
            (
                mesh is not None and mesh.size > 1,
                f"{target.name} is on {mesh and mesh.size} devices, and a session decodes on one: "
                "load the target without mesh=, or use specjax.serve.Engine",
            ),
            (bool(given), f"{', '.join(given)} are of a turn: pass them to generate"),
        )
        self.target, self.capacity = target, capacity
        self.kept = self.read = 0
        self._options = options
        self._fixed = {name: options[name] for name in _FIXED if name in options}
        request = load_named(target, make_request(None, {"max_new_tokens": 1, **options}))
        self._fixed |= {
            name: getattr(request, name) for name in ("draft", "drafter", "proposer", "num_drafts")
        }
        self._fixed["speculative_config"] = None
        self._decoder: Decoder | None = None
        self._prepared: Prepared | None = None  # of the first turn
        self._ready: Ready | None = None
        self._turn = 0  # the number of the turn that began last
        self.forget()
        # A constraint needs room for its shortest text.
        new = 1 if request.constraint is None else capacity - 1
        self._prepare([[0]], False, {"max_new_tokens": new, "min_new_tokens": 0})

    def forget(self) -> None:
        """Forgets the text, so that the next turn reads its whole prompt."""
        self._turn += 1  # a stream that is being read keeps nothing
        self._held: Held | None = None
        self._text = np.zeros(0, np.int32)  # whose tokens are committed, but the last
        self._snapshots: list[tuple[int, Held]] = []

    @overload
    def generate(
        self,
        prompts: Prompts | None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[Options],
    ) -> Output: ...

    @overload
    def generate(
        self, prompts: Prompts | None = None, *, stream: Literal[True], **options: Unpack[Options]
    ) -> TextStream: ...

    def generate(
        self, prompts: Prompts | None = None, *, stream: bool = False, **options: Any
    ) -> Output | TextStream:
        """Continues the whole text of one conversation, as `specjax.generate`.

        Args:
          prompts: the text so far, or a list with one text or one list of token ids.
          stream: return a `TextStream`; the next turn reads its whole prompt unless the stream was
            read to its end.
          **options: fields of `specjax.Request` for this turn, such as `messages`, `seed` and
            `max_new_tokens`.

        Raises:
          ValueError: an option that cannot be used, or a text that exceeds the capacity, before
            anything is read.
        """
        changed = [name for name in _FIXED if name in options]
        if changed:
            raise ValueError(
                f"{changed[0]}={shown(options[changed[0]])} is for all turns of a session: pass it "
                "to specjax.Session"
            )
        prepared = self._prepare(prompts, stream, options)
        if self._decoder is None:
            self._prepared = prepared
            self._decoder = self._roomy(prepared)
        first = self._prepared
        assert first is not None
        own = dataclasses.replace(
            prepared,
            decoder=self._decoder,
            drafter=first.drafter,
            slots=first.slots,
            num_drafts=first.num_drafts,
            documents=first.documents,
            learns=first.learns,
        )
        return decode(own, self._begun)

    def _prepare(self, prompts: Prompts | None, stream: bool, options: dict[str, Any]) -> Prepared:
        request = make_request(prompts, {**self._options, **options})
        request = dataclasses.replace(request, **self._fixed)
        settle(
            (
                isinstance(request.constraint, Grammar),
                f"constraint={shown(request.constraint)} is followed on the host: pass a Regex, a "
                "JSONSchema or a Choice, or use generate",
            ),
            (
                request.expected is not None,
                f"expected={shown(request.expected)} is for generate: a session looks up in its "
                'own text with proposer="ngram"',
            ),
        )
        prepared = prepare(self.target, request, stream=stream)
        self._check_room(prepared)
        # The states of all turns have one form, so all options are compiled at once.
        return dataclasses.replace(prepared, drafter=on_demand(prepared.drafter, False))

    def _check_room(self, prepared: Prepared) -> None:
        if len(prepared.lengths) != 1:
            raise ValueError(
                f"the turn has {len(prepared.lengths)} prompts, and a session holds one text: make "
                "a session for each"
            )
        count, new = int(prepared.lengths[0]), prepared.new
        if count + new > self.capacity:
            less = self.capacity - count
            cure = f"pass max_new_tokens={less} or less, or" if less > 0 else "shorten it, or"
            raise ValueError(
                f"the prompt has {count} tokens, and max_new_tokens={new} make {count + new}, but "
                f"the session holds {self.capacity}: {cure} make it with a larger capacity="
            )

    def _roomy(self, prepared: Prepared) -> Decoder:
        """Returns the decoder of all turns, with room for a pass over new tokens."""
        proposer = prepared.decoder.proposer
        capacity = capacity_for(proposer, WIDEST_TURN, self.capacity + WIDEST_TURN)
        return dataclasses.replace(prepared.decoder, capacity=capacity)

    def _begun(self, prepared: Prepared) -> _Turn:
        """Returns a turn with its weights; a stream begins when its first piece is read."""
        self._turn += 1
        ready = self._ready
        if ready is None:
            # Costs of an adaptive drafter are measured once, from a reading of their own.
            ready = warm_up(prepared) if prepared.learns else place(prepared)
            self._ready = ready
        else:
            ready = dataclasses.replace(ready, seconds=0.0)
        return _Turn(
            prepared, ready.runner, ready.params, ready.learned, ready.seconds,
            session=self, number=self._turn,
        )  # fmt: skip

    def _begin(self, turn: _Turn) -> DecodeState:
        """Reads what is new of the prompt, and returns the state that decodes."""
        prepared, decoder = turn.prepared, turn.prepared.decoder
        turns = Turns(decoder)
        count = int(prepared.lengths[0])
        prompt = prepared.prompt[0, :count]
        held, kept = self._beginning(turns, turn, prompt)
        self._snapshots = [one for one in self._snapshots if one[0] <= kept]
        new = prompt[kept : count - 1]
        held = turns.read(turn.params, held, new)
        self.kept, self.read = kept, len(new)
        self._note(turns, count - 1, held)
        (seeds, rows), drafts = prepared.seeds, prepared.num_drafts
        if drafts is None:
            drafts = np.full(1, decoder.proposer.max_depth, np.int32)
        padded = np.zeros((1, decoder.capacity), np.int32)
        padded[0, :count] = prompt
        inputs = RowInputs(
            padded,
            prepared.lengths,
            limit=np.array([count + prepared.new], np.int32),
            num_drafts=drafts,
            sampling=prepared.sampling,
            key=keys_of_rows(folded_keys(seeds, rows), 1),
            processors=prepared.processors,
            eos=prepared.eos,
            rule=decoder.numbers(1),
        )
        return turns.begin(held, inputs)

    def _beginning(self, turns: Turns, turn: _Turn, prompt: np.ndarray) -> tuple[Held, int]:
        """Returns the longest beginning of the prompt that is known, and its tokens."""
        text, held = self._text, self._held
        self._held, self._text = None, np.zeros(0, np.int32)  # its arrays are donated
        most = min(len(text), len(prompt)) - 1
        if held is not None and most > 0:
            same = text[:most] == prompt[:most]
            common = most if same.all() else int(same.argmin())
            if common == len(text) - 1:
                return held, common
            # A drafter may need the hidden state of the last token.
            cut = min(common, len(prompt) - 2)
            if cut > 0 and turns.cuts(held):
                return turns.first(held, cut), cut
            fitting = [one for one in self._snapshots if one[0] <= common]
            if fitting:
                number, before = fitting[-1]
                return turns.gone_back(before, held), number
        del held  # two would need twice the memory
        turns.check_memory(turn.params, turn.prepared.documents)
        return turns.empty(turn.params, turn.prepared.documents), 0

    def _note(self, turns: Turns, count: int, held: Held) -> None:
        """Keeps a snapshot of a state that cannot be cut."""
        known = {number for number, _ in self._snapshots}
        if count and count not in known and not turns.cuts(held):
            self._snapshots = [*self._snapshots, (count, turns.snapshot(held))][-_SNAPSHOTS:]

    def _end(self, turn: _Turn, state: DecodeState) -> None:
        """Keeps the caches of a turn that has ended, unless another one began after it."""
        if turn.number != self._turn:
            return
        turns = Turns(turn.prepared.decoder)
        held = turns.caught_up(turn.params, Held(state.cache, state.proposer))
        if held is None:
            self.forget()
            return
        length = int(state.length[0])
        self._held, self._text = held, np.asarray(state.tokens)[0, :length]
        self._note(turns, length - 1, held)
