"""python -m bench.datastore: tokens a pass from a datastore of Python code, and a lookup's cost.

The corpus is the Python files of this machine without those that the prompts are from.
Every row is measured with the target: `specjax.generate` with the rule `match`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sysconfig
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from bench.command import Report, run
from bench.prompts import SHIPPED
from bench.suffix_tree import INSTALL, Peer, Setting
from specjax.contract import Proposer
from specjax.generation import encode_file
from specjax.methods import DEPTH, DatastoreParams, look_up, predict_size
from specjax.options import fields
from specjax.options.command import parse
from specjax.options.exits import say
from specjax.sampling import argmax
from specjax.training.corpus import Source
from specjax.training.tokenising import prepare

_PATHS = sysconfig.get_paths()
_EXCLUDED = ("site-packages", "transformers", "sympy", "test", "tests")
_TREE = (3, 2, 1)
_PEER = tuple(
    Setting(most, tree, factor)
    for most, tree in ((4, False), (8, False), (15, True))
    for factor in (1.0, 4.0)
)


@dataclasses.dataclass(frozen=True)
class DatastoreOptions(fields.Options):
    """The options of `python -m bench.datastore`."""

    data: tuple[str, ...] = fields.option(
        (_PATHS["stdlib"], _PATHS["purelib"]),
        "folders of Python files; default: this Python's library and packages",
    )
    exclude: tuple[str, ...] = fields.option(_EXCLUDED, "folders to leave out")
    corpus: str = fields.option(
        "runs/datastore", "folder for the tokenised corpus; one that is there is read"
    )
    tokens: str | None = fields.option(None, "a train.bin, instead of --data")
    first: int | None = fields.option(None, "use the first so many tokens of the corpus only")
    peer: bool = fields.option(
        False, "also count what arctic-inference's suffix tree of the same tokens drafts"
    )
    target: str = fields.option(str(SHIPPED.parent / "target"), "folder of the target")
    prompt_file: str = fields.option(str(SHIPPED), "file of the prompts")
    temperatures: tuple[float, ...] = fields.option(
        (0.0, 1.0), "sampling temperatures; 0 is greedy"
    )
    max_new_tokens: int = fields.option(128, "limit per text, in tokens")
    lookups: int = fields.option(200, "how many are timed at once")
    rounds: int = fields.option(15, "of timing; 0 times nothing")
    json: str | None = fields.option(None, "write the figures to this file")


def main(argv: list[str] | None = None) -> None:
    arguments = parse(DatastoreOptions, argv, __doc__, "python -m bench.datastore")
    target = specjax.load(arguments.target, "float32")
    file = arguments.tokens
    if file is None:
        source = Source(tuple(arguments.data), "*.py", tuple(arguments.exclude))
        tokenizer = str(pathlib.Path(arguments.target) / "tokenizer.json")
        size = target.model.vocab_size
        file = prepare(source, pathlib.Path(arguments.corpus), size, tokenizer)[1].path
    dtype = np.uint16 if target.model.vocab_size <= 2**16 else np.uint32
    corpus = np.memmap(file, dtype, "r")[: arguments.first]
    # Loaded first: it may be missing, and the rest takes minutes.
    peer = None
    if arguments.peer:
        try:
            peer = Peer(corpus)
        except ImportError as error:
            raise ValueError(f"--peer needs arctic-inference ({error}): {INSTALL}") from None
    say(f"building a datastore: {predict_size([corpus], None, target.model.vocab_size)}")
    started = time.perf_counter()
    store = specjax.Datastore.build([corpus], target, name="Python code")
    report: Report = {
        "tokens": store.size,
        "bytes_per_token": store.tokens.itemsize + 4,
        "build_seconds": time.perf_counter() - started,
        "rows": acceptance(target, store, peer, arguments),
    }
    if arguments.rounds:
        report["lookup_microseconds"] = lookups(store, arguments.lookups, arguments.rounds)
    print(table(report, arguments.temperatures))
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(report))


def acceptance(
    target: specjax.LanguageModel,
    store: specjax.Datastore,
    peer: Peer | None,
    arguments: DatastoreOptions,
) -> list[Report]:
    """Tokens a pass of each proposer at each temperature, over all prompts."""
    chain = store.drafter(target)
    tree = chain.shaped(specjax.StaticTree, branching=_TREE)
    contestants: dict[str, Proposer | specjax.Drafter] = {
        "prompt lookup, 4 drafts": specjax.NGram(4),
        "datastore, 4 drafts": chain,
        "datastore, 8 drafts": chain.shaped(specjax.Chain, num_drafts=8),
        "datastore, 15 drafts": chain.shaped(specjax.Chain, num_drafts=15),
        f"datastore, tree {' '.join(map(str, _TREE))}": tree,
        "datastore, dynamic tree of 15 drafts": chain.shaped(
            specjax.DynamicTree, depth=8, width=4, num_nodes=16
        ),
        "first of prompt lookup and datastore, 4 drafts": specjax.first_of(specjax.NGram(4), chain),
        "auto: plain decoding or datastore, up to 4 drafts": specjax.adaptive(lookup=chain),
    }
    prompts = encode_file(target, pathlib.Path(arguments.prompt_file))
    plain: dict[float, list[list[int]]] = {}
    rows: list[Report] = []
    for name, proposer in contestants.items():
        row: Report = {"name": name}
        for temperature in arguments.temperatures:
            write = functools.partial(
                specjax.generate, target, prompts, temperature=temperature,
                max_new_tokens=arguments.max_new_tokens,
            )  # fmt: skip
            if temperature not in plain:
                plain[temperature] = write().tokens
            made = write(proposer=proposer)
            if made.tokens != plain[temperature]:
                raise ValueError(f"{name} wrote another text than plain decoding: this is a bug")
            row[str(temperature)] = made.stats.mean_accepted_length
        rows.append(row)
        figures = (f"{row[str(t)]:.2f} at temperature {t:g}" for t in arguments.temperatures)
        say(f"{name}: {', '.join(figures)}")
    if peer is None:
        return rows
    for setting in _PEER:
        found = {str(t): peer.tokens_per_pass(prompts, plain[t], setting) for t in plain}
        rows.append({"name": str(setting), **found})
    return rows


def lookups(store: specjax.Datastore, count: int, rounds: int) -> dict[str, float]:
    """Microseconds of a lookup in a datastore of the first million tokens, and in all of it.

    One lookup is the distribution after one context, with a text of 512 tokens of the row's own;
    the least of all rounds.
    """
    million = DEPTH + min(store.size, 10**6)
    small = specjax.Datastore.build(
        [np.asarray(store.tokens[DEPTH:million][store.tokens[DEPTH:million] < store.vocab_size])],
        vocab_size=store.vocab_size,
    )
    times = {}
    for one in (small, store):
        params = one.arrays()
        contexts = np.stack([
            one.tokens[at : at + DEPTH][::-1].astype(np.int32)
            for at in np.random.default_rng(0).integers(DEPTH, one.size - 1, 1024)
        ])  # fmt: skip
        times[f"{one.size} tokens"] = _seconds(params, contexts, count, rounds) * 1e6
    return times


def _seconds(params: DatastoreParams, contexts: np.ndarray, count: int, rounds: int) -> float:
    text = jnp.asarray(np.resize(contexts[:32, 0], 512))

    @jax.jit
    def many(params: DatastoreParams, contexts: jax.Array, text: jax.Array) -> jax.Array:
        def body(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            total, text = carry
            made = look_up(params, contexts[index % len(contexts)], text, jnp.int32(len(text)))
            # Each lookup depends on the one before.
            best = argmax(made)
            return total + made[best], text.at[index % len(text)].set(best)

        return jax.lax.fori_loop(0, count, body, (jnp.float32(0), text))[0]

    arrays = jnp.asarray(contexts)
    jax.block_until_ready(many(params, arrays, text))
    least = np.inf
    for _ in range(rounds):
        started = time.perf_counter()
        jax.block_until_ready(many(params, arrays, text))
        least = min(least, time.perf_counter() - started)
    return least / count


def table(report: Report, temperatures: Sequence[float]) -> str:
    """The report as text."""
    lines = [
        f"{report['tokens']:,} tokens, {report['bytes_per_token']} bytes a token, built in "
        f"{report['build_seconds']:.0f} s",
        "",
        "| tokens a pass | " + " | ".join(f"temperature {t:g}" for t in temperatures) + " |",
        "|" + "---|" * (1 + len(temperatures)),
    ]
    for row in report["rows"]:
        figures = " | ".join(f"{row[str(t)]:.2f}" for t in temperatures)
        lines.append(f"| {row['name']} | {figures} |")
    for name, value in report.get("lookup_microseconds", {}).items():
        lines += ["", f"a lookup in {name}: {value:.1f} microseconds"]
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
