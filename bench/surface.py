"""python -m bench.surface: the tokens a pass that drafts need to pay, by context and batch.

A step with drafts of which none is accepted (`SyntheticAcceptance(rate=0)`) gives one token, as a
step without drafts does.  So the quotient of their times is the number of tokens that a pass must
give before drafts pay: the break-even.  No data set and no trained draft is needed.

On this device the steps are timed in turns, on random weights, and the least time counts.  The
caches hold zeros up to the context: only their length matters.  For a target of 8B parameters on
accelerators the times are predicted from what a step reads and computes: the weights of both
models, the keys and values of all rows, and the products.  With `--draft-window` the draft model
reads only so many of the last keys and values.  With `--draft self` the target drafts for itself
in such a window of its own cache (`NearSelfSource`; no further weights are kept, but they are read
again for each draft); with `--selected` also in so many chunks of `--chunk` tokens.  Its steps copy
what the drafts read, and read two vectors for each chunk of the text.  The last column is the speed
over plain decoding at `--acceptance`.  Activations, launches and sampling are left out.  A step
with drafts has more of them, so the predicted break-even is too low rather than too high.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from bench.command import Report, run
from bench.compiled.chips import CHIPS, chip
from bench.compiled.sizes import config_of
from bench.weights import SIZES
from specjax._internal.checks import whole
from specjax.decoding import expected_accepted_length
from specjax.drafters import BoundDrafter
from specjax.measure import Sample, Timed, describe, first_calls
from specjax.models import LinenModel, Transformer, attend_on
from specjax.options import fields
from specjax.options.command import parse
from specjax.plot import new_figure
from specjax.types import DecodeState

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PROMPT, _ROOM = 16, 2048


@dataclasses.dataclass(frozen=True)
class SurfaceOptions(fields.Options):
    """The options of `python -m bench.surface`."""

    size: str = fields.option("15m", "of the random weights that are timed", choices=sorted(SIZES))
    context: tuple[int, ...] = fields.option((1024, 4096, 16384), "tokens of a text, timed")
    batch: tuple[int, ...] = fields.option((1, 4), "rows, timed")
    num_drafts: int = fields.count(4, "draft tokens of a step")
    vocab_size: int = fields.count(2048, "of the random weights", 2)
    steps: int = fields.count(8, "steps of a sample")
    rounds: int = fields.count(3, "samples of each cell", 0)
    chip: tuple[str, ...] = fields.option(("h100", "v5e"), "predicted", choices=sorted(CHIPS))
    predicted_context: tuple[int, ...] = fields.option(
        (1024, 8192, 32768, 131072), "tokens of a text, predicted"
    )
    predicted_batch: tuple[int, ...] = fields.option((1, 16), "rows, predicted")
    draft_window: int | None = fields.option(
        None, "the draft model reads only so many of the last keys and values"
    )
    draft: str = fields.option(
        "model",
        "a smaller draft model, or the target itself with a window",
        choices=("model", "self"),
    )
    selected: int = fields.count(0, "chunks that a target with --draft self also reads", 0)
    chunk: int = fields.count(32, "tokens of such a chunk")
    acceptance: float = fields.option(0.8, "the rate of the last column")
    json: str | None = fields.option(None, "write the cells to this file")
    plot: str | None = fields.option(None, "draw the cells to this file")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft == "self" and self.draft_window is None:
            raise ValueError("--draft self drafts with the target in a window: add --draft-window")
        if self.selected and self.draft != "self":
            raise ValueError("--selected is for a target that drafts for itself: add --draft self")
        leasts = {"context": _PROMPT, "batch": 1, "predicted_context": 1, "predicted_batch": 1}
        for name, least in leasts.items():
            for given in getattr(self, name):
                whole(f"--{name.replace('_', '-')}", given, least, 2**31 - 1, f"at least {least}")
        if not 0 <= self.acceptance <= 1:
            raise ValueError(f"--acceptance {self.acceptance:g}; it must be in [0, 1]")
        if self.draft_window is not None:
            whole("--draft-window", self.draft_window, 1, 2**31 - 1, "at least 1")


class _Steps(Timed):
    """Steps of one decoder at several contexts, which are its items."""

    def __init__(
        self, name: str, decoder: specjax.Decoder, params: specjax.Params, rows: int, steps: int,
        contexts: Sequence[int],
    ) -> None:  # fmt: skip
        super().__init__(name, len(contexts))
        self._decoder, self._params, self._rows = decoder, params, rows
        self._steps, self._contexts = steps, contexts

    def run(self, item: int) -> Sample:
        state = jax.block_until_ready(self._state(self._contexts[item]))
        started = time.perf_counter()
        jax.block_until_ready(self._decoder.run(self._params, state, self._steps))
        return Sample((time.perf_counter() - started) / self._steps)

    def _state(self, context: int) -> DecodeState:
        """Returns the state of a text of this length, of which only the last tokens are real."""
        lengths = np.full(self._rows, _PROMPT, np.int32)
        state = self._decoder.prefill(
            self._params,
            np.ones((self._rows, _PROMPT), np.int32),
            lengths,
            limit=np.full(self._rows, self._decoder.capacity, np.int32),
            sampling=specjax.Sampling.create(self._rows, temperature=0.0),
            key=jax.random.split(specjax.make_key(0), self._rows),
        )
        more = context - _PROMPT

        def longer(x: Any) -> Any:
            is_cache = isinstance(x, specjax.KVCache)
            return dataclasses.replace(x, length=x.length + more) if is_cache else x

        moved = jax.tree.map(longer, state, is_leaf=lambda x: isinstance(x, specjax.KVCache))
        return dataclasses.replace(moved, length=state.length + more)


def measured(options: SurfaceOptions) -> list[Report]:
    """Returns a cell for each context and batch, timed on this device."""
    longest = max(options.context) + _ROOM
    models = [
        _model(*shape, options.vocab_size, longest, role)
        for shape, role in zip(SIZES[options.size], ("target", "draft"), strict=True)
    ]
    target, draft = models
    if options.draft == "self":
        assert options.draft_window is not None  # checked by the options
        own = specjax.NearSelf(
            target.model, options.draft_window, num_drafts=options.num_drafts,
            selected=options.selected, chunk=options.chunk,
        )  # fmt: skip
        drafter: specjax.Drafter = BoundDrafter(own)
    else:
        if options.draft_window is not None:
            draft = specjax.window_draft(draft, options.draft_window)
        drafter = specjax.make_drafter(target, draft, num_drafts=options.num_drafts)
    cells = []
    for rows in options.batch:
        rule = specjax.SyntheticAcceptance(rate=0.0)
        plain = specjax.Decoder(target.model, specjax.NoProposer(), specjax.Match(), (), longest)
        drafting = specjax.Decoder(target.model, drafter.proposer, rule, (), longest)
        ways = [
            _Steps("plain", plain, specjax.Params(target.params), rows, options.steps,
                   options.context),
            _Steps("drafts", drafting, specjax.Params(target.params, drafter.arrays(target, rows)),
                   rows, options.steps, options.context),
        ]  # fmt: skip
        first_calls(ways)
        # The least of several turns, disturbed ones too: other processes only add time.
        for _, item, way in itertools.product(
            range(options.rounds), range(len(options.context)), ways
        ):
            way.seconds[item].append(way.run(item).seconds)
        for item, context in enumerate(options.context):
            known = [min(way.seconds[item]) for way in ways]
            cells.append(
                {"on": "this device", "context": context, "batch": rows, "plain": known[0],
                 "drafting": known[1], "break_even": known[1] / known[0]}
            )  # fmt: skip
    return cells


def _model(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, longest: int,
    name: str,
) -> specjax.LanguageModel:  # fmt: skip
    config = specjax.TransformerConfig(
        vocab_size=vocab, hidden_size=hidden, mlp_size=mlp, num_layers=layers, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=hidden // heads, max_positions=longest,
    )  # fmt: skip
    network = Transformer(config, attend=attend_on(jax.devices()[0]))
    model = LinenModel(network, jnp.dtype("float32"))
    return specjax.LanguageModel(model, model.init(jax.random.key(0)), None, (), name)


def pass_seconds(
    config: specjax.TransformerConfig, name: str, rows: int, tokens: int, context: int
) -> float:
    """Predicts a pass of a model on a chip: its bytes or its operations, whichever takes longer.

    Args:
      config: of the model, in bfloat16.
      name: of the chip.
      rows, tokens: of the pass; each row has `tokens` new tokens.
      context: keys and values that a row reads.
    """
    c, made = config, chip(name)
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    weights = c.num_layers * (attention + 3 * c.hidden_size * c.mlp_size)
    weights += c.vocab_size * c.hidden_size
    products = 2 * weights * rows * tokens
    products += 4 * c.num_layers * c.num_heads * c.head_dim * context * rows * tokens
    read = 2 * weights + _cached_bytes(c, rows, context)
    return max(read / made.bandwidth, products / made.flops)


def _cached_bytes(config: specjax.TransformerConfig, rows: int, context: int) -> int:
    """Returns the bytes of the keys and values of so many tokens of each row, in bfloat16."""
    return 4 * config.num_layers * config.num_kv_heads * config.head_dim * context * rows


def predicted(options: SurfaceOptions) -> list[Report]:
    """Returns a cell for each chip, context and batch, for an 8B with a draft of 1B or itself."""
    target = config_of("8b")
    draft = config_of("1b") if options.draft == "model" else target
    cells = []
    for name in options.chip:
        for rows in options.predicted_batch:
            for context in options.predicted_context:
                seen = (options.draft_window or context) + options.selected * options.chunk
                seen = min(context, seen)
                plain = pass_seconds(target, name, rows, 1, context)
                verify = pass_seconds(target, name, rows, options.num_drafts + 1, context)
                each = pass_seconds(draft, name, rows, 1, seen)
                drafting = verify + options.num_drafts * each
                if options.draft == "self":
                    # What is copied is read and written, and a chunk has bounds as long as the
                    # keys and values of a token.
                    moved = 2 * seen + (context // options.chunk if options.selected else 0)
                    drafting += _cached_bytes(target, rows, moved) / chip(name).bandwidth
                cells.append(
                    {"on": name, "context": context, "batch": rows, "plain": plain,
                     "drafting": drafting, "break_even": drafting / plain}
                )  # fmt: skip
    return cells


def table(cells: Sequence[Report], tokens: float) -> str:
    """Returns the cells as Markdown; a pass with drafts gives so many tokens in the last column."""
    lines = [
        "| on | batch | context | plain, ms | with drafts, ms | break-even | speed |",
        "|" + "---|" * 7,
    ]
    lines += [
        f"| {c['on']} | {c['batch']} | {c['context']} | {1e3 * c['plain']:.2f} "
        f"| {1e3 * c['drafting']:.2f} | {c['break_even']:.2f} "
        f"| {tokens / c['break_even']:.2f} |"
        for c in cells
    ]
    return "\n".join(lines)


def draw(cells: Sequence[Report]) -> Figure:
    """Draws the break-even by context: a panel for each device, a line for each batch."""
    places = list(dict.fromkeys(c["on"] for c in cells))
    figure = new_figure(1 + 4 * len(places), 4)
    panels = figure.subplots(1, len(places), squeeze=False, sharey=True)[0]
    for axes, place in zip(panels, places, strict=True):
        mine = [c for c in cells if c["on"] == place]
        for rows in dict.fromkeys(c["batch"] for c in mine):
            line = [c for c in mine if c["batch"] == rows]
            axes.plot(
                [c["context"] for c in line], [c["break_even"] for c in line],
                marker="o", label=f"batch {rows}",
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_title(place)
        axes.set_xlabel("tokens of the text")
        axes.legend()
    panels[0].set_ylabel("tokens a pass at which drafts pay")
    return figure


def main(argv: list[str] | None = None) -> None:
    options = parse(SurfaceOptions, argv, __doc__, "python -m bench.surface")
    if options.plot:
        new_figure()  # fails now, not after the table, if matplotlib is missing
    cells = [*(measured(options) if options.rounds else []), *predicted(options)]
    print("{device}, {cores} cores, jax {jax}, {date}".format(**describe()))
    print(table(cells, expected_accepted_length(options.acceptance, options.num_drafts)))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(cells, indent=1) + "\n")
    if options.plot:
        draw(cells).savefig(options.plot)


if __name__ == "__main__":
    run(main)
