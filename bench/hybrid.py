"""python -m bench.hybrid: what speculation gains on a target with recurrent layers.

A target in the layout of Qwen3.5 (three gated delta nets, then an attention) and a dense one of the
same size take turns: plain decoding, and a chain and a tree of one small draft model for both, at
an imposed acceptance; and plain decoding of transformers.  The weights are random.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import tempfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from bench import prompts
from bench.command import Report, run
from bench.contestants import Contestant, Imposition, ours, theirs
from bench.imposed import coins
from bench.report import ratio
from bench.timing import Timed
from bench.weights import Pair, from_folders, random_folders
from specjax import LanguageModel, LinenModel, Transformer, TransformerConfig
from specjax.measure import Interval, Meter, describe, first_calls, show, take_turns
from specjax.models import FAMILIES
from specjax.options import fields
from specjax.options.command import parse

# Hidden size, MLP size, layers, heads, key heads, head size; key heads, value heads and their size
# of a delta net; and the dense pair of `bench.weights` of the same size.
_SIZES = {
    "tiny": (64, 144, 4, 2, 1, 32, 1, 2, 32, "tiny"),
    "110m": (768, 1792, 12, 4, 2, 256, 4, 8, 128, "110m"),
}
_MODELS = ("hybrid", "dense")


@dataclasses.dataclass(frozen=True)
class HybridOptions(fields.Options):
    """The options of `python -m bench.hybrid`."""

    size: str = fields.option("110m", "of both targets", choices=sorted(_SIZES))
    vocab_size: int = fields.option(32000, "of the random weights")
    dtype: str = fields.option("float32", "of the weights", choices=("float32", "bfloat16"))
    acceptance: float = fields.option(0.8, "probability that a draft is right")
    num_drafts: int = fields.option(4, "of the chain")
    branching: tuple[int, ...] = fields.option((1, 2, 2), "of the tree: children of each level")
    new_tokens: int = fields.option(64, "of a text")
    rounds: int = fields.option(7, "measured turns")
    peer: bool = fields.option(True, "also run plain decoding of transformers")
    disturbed: bool = fields.option(
        False, "keep samples that other processes disturbed, and print how busy they were"
    )
    weights: str = fields.option(
        str(pathlib.Path(tempfile.gettempdir()) / "specjax-bench"), "folder for random weights"
    )
    json: str | None = fields.option(None, "write the rows to this file")

    def __post_init__(self) -> None:
        super().__post_init__()
        fields.inside(self, "[1, inf)", "vocab_size", "num_drafts", "new_tokens", "rounds")
        fields.inside(self, "[0, 1]", "acceptance")


def config_of(size: str, vocab_size: int) -> TransformerConfig:
    """Returns the configuration of a target in the layout of Qwen3.5."""
    hidden, mlp, layers, heads, kv_heads, head_dim, keys, values, dim, _ = _SIZES[size]
    config = {
        "model_type": "qwen3_5_text", "vocab_size": vocab_size, "hidden_size": hidden,
        "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "linear_num_key_heads": keys,
        "linear_num_value_heads": values, "linear_key_head_dim": dim, "linear_value_head_dim": dim,
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
        "initializer_range": hidden**-0.5,
    }  # fmt: skip
    return FAMILIES["qwen3_5_text"].read_config(config)


def pairs(options: HybridOptions) -> dict[str, Pair]:
    """Returns each target with the same draft model."""
    folder, dtype = pathlib.Path(options.weights), options.dtype
    dense, draft = random_folders(_SIZES[options.size][-1], options.vocab_size, folder, dtype)
    hybrid = folder / f"{options.size}-{options.vocab_size}-{dtype}-hybrid"
    if not (hybrid / "model.safetensors").exists():
        model = LinenModel(Transformer(config_of(options.size, options.vocab_size)))
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), model.init(jax.random.key(3)))
        specjax.save(LanguageModel(model, params, None, (), hybrid.name), hybrid)
    return {
        name: from_folders(target, draft, dtype)
        for name, target in zip(_MODELS, (hybrid, dense), strict=True)
    }


class _Timed(Timed):
    """A contestant of one target, with the load of other processes at each of its samples."""

    def __init__(
        self, model: str, entry: Contestant, batches: Sequence[np.ndarray], options: HybridOptions
    ) -> None:
        super().__init__(entry, batches, options.new_tokens)
        self.model, self.busy, self._keeps = model, [], options.disturbed

    def measure(self, item: int) -> None:
        if not self._keeps:
            super().measure(item)
            return
        meter = Meter()
        self.seconds[item].append(self.run(item).seconds)
        self.busy.append(meter.busy())


def contestants(
    name: str, pair: Pair, batches: list[np.ndarray], options: HybridOptions
) -> list[_Timed]:
    """Returns the contestants of a target: plain, chain, tree, and transformers."""
    script = _script(pair.target, batches[0], options)
    both = pair.target, pair.draft
    entries = [
        ours(*both, "plain"),
        ours(*both, "draft", options.num_drafts, script, name="chain"),
        ours(*both, "tree", len(options.branching), script, name="tree",
             branching=options.branching),
        *([theirs(pair, "plain")] if options.peer else []),
    ]  # fmt: skip
    return [_Timed(name, entry, batches, options) for entry in entries]


def _script(target: LanguageModel, prompt: np.ndarray, options: HybridOptions) -> Imposition:
    """Returns what the target writes, and which of its tokens are drafted right."""
    nodes = int(np.cumprod(options.branching).sum())
    width = max(options.num_drafts, nodes) + 1
    # At the width of a speculative step, whose sums round as its own do.
    text = ours(target, None, "plain", width=width).run(prompt, options.new_tokens)
    lookaheads = (options.num_drafts, len(options.branching))
    right = coins(1, options.new_tokens, options.acceptance, lookaheads)
    text = np.concatenate([prompt, text], axis=1)
    ahead = ((0, 0), (0, width))
    return np.pad(text, ahead), np.pad(right, ((0, 0), (prompt.shape[1], width)))


def rows_of(timed: list[_Timed], options: HybridOptions) -> list[Report]:
    """Returns a row for each contestant: its speed, over plain decoding and over transformers."""
    found = {(t.model, t.contestant.library, t.contestant.name): t for t in timed}
    rows = []
    for (model, library, name), t in found.items():
        plain, peer = found[model, "specjax", "plain"], found.get((model, "transformers", "plain"))
        row: Report = {"model": model, "library": library, "way": name, "seconds": t.seconds}
        row |= t.acceptance()
        row["tokens_per_second"] = options.new_tokens / t.median if t.median else None
        row["same_tokens"] = bool((t.tokens[0] == plain.tokens[0]).all())
        row["dropped"], row["busy"] = t.dropped, statistics.median(t.busy) if t.busy else None
        for key, other in (("over_plain", plain), ("over_transformers", peer)):
            measured = other if other is not None and other.median and t.median else None
            row[key] = ratio(measured.seconds, t.seconds) if measured else None
        rows.append(row)
    return rows


def gains(timed: list[_Timed]) -> dict[str, Interval]:
    """Returns the gain of a chain and of a tree on the hybrid, over that on the dense target."""
    samples = {
        (t.model, t.contestant.name): t.seconds[0]
        for t in timed
        if t.contestant.library == "specjax"
    }
    made, draw = {}, np.random.default_rng(0)
    for way in ("chain", "tree"):
        order = [(model, name) for model in _MODELS for name in ("plain", way)]
        if not all(samples[key] for key in order):
            continue
        (a, b, c, d), (p, q, r, s) = (
            [np.median(samples[key]) for key in order],
            [
                np.median(draw.choice(x, (2000, len(x))), axis=1)
                for x in (samples[k] for k in order)
            ],
        )
        low, high = np.quantile(p / q / (r / s), [0.025, 0.975])
        made[way] = a / b / (c / d), float(low), float(high)
    return made


def table(rows: list[Report]) -> str:
    over = "over_plain", "over_transformers"
    columns = ("model", "library", "way", "tokens/s", "over plain", "over transformers", "alpha",
               "tau", "same tokens", "dropped", "others busy")  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        speed, busy = row["tokens_per_second"], row["busy"]
        cells = [
            row["model"], row["library"], row["way"], f"{speed:.1f}" if speed else "",
            *(show(row[key], ".2f") for key in over),
            *(f"{row[key][0]:.2f}" if row[key] else "" for key in ("alpha", "tau")),
            "yes" if row["same_tokens"] else "no", row["dropped"],
            "" if busy is None else f"{busy:.0%}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    options = parse(HybridOptions, argv, __doc__, "python -m bench.hybrid")
    made = pairs(options)
    timed: list[_Timed] = []
    for name, pair in made.items():
        batches = prompts.batches(pair.target, None, 1, None)
        timed += contestants(name, pair, batches, options)
    first_calls(timed)
    take_turns(timed, options.rounds)
    head, rows, over = describe(), rows_of(timed, options), gains(timed)
    sizes = ", ".join(f"{name} {pair.target.num_params / 1e6:.0f} M" for name, pair in made.items())
    print(f"{head['device']}, {head['cores']} cores, jax {head['jax']}, {options.dtype}, {sizes}")
    print(table(rows))
    for way, found in over.items():
        print(
            f"{way}: the gain on the hybrid over the gain on the dense target: {show(found, '.2f')}"
        )
    if options.json:
        report = {"machine": head, "options": vars(options), "rows": rows, "gains": over}
        pathlib.Path(options.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    run(main)
