"""Thousands of requests at once, each of which must get the text that it gets alone.

    python -m tests.load --requests 10000 --seed 1
    python -m tests.load --requests 10000 --seed 1 --pages 20 --chunk 64
    python -m tests.load --requests 200 --slots 4 --mesh data=2,model=2

The requests of one run go to one engine, from several threads and in a random order: with all kinds
of drafters, lookaheads and settings, prompts that share their beginnings, and neighbours that are
cancelled.  Then the same engine serves each request alone, and in float32 `generate` decodes a part
of them.  A difference prints the seed of the request.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import math
import os
import pathlib
import time
from typing import Any

import jax
import numpy as np

import specjax
from specjax.methods import BoundDrafter
from specjax.parallel import parse_mesh
from specjax.serve import Busy, Engine, Handle, Served

TINY = pathlib.Path(__file__).parent.parent / "checkpoints" / "tiny"
CAPACITY, CHUNK, NEW = 192, 32, 24
LOGPROBS = 2


MESH: dict[str, int] = {}
"""Devices along the axes of the mesh that the pair is loaded on; none: one device."""


@functools.cache
def models(dtype: str = "float32") -> tuple[specjax.LanguageModel, specjax.LanguageModel]:
    """The shipped tiny pair; the draft model is small, and every device holds all of it."""
    mesh = specjax.make_mesh(**MESH) if MESH else None
    return specjax.load(TINY / "target", dtype, mesh=mesh), specjax.load(TINY / "draft", dtype)


@functools.cache
def drafters(dtype: str = "float32") -> dict[str, specjax.Drafter]:
    """Of every kind that a row can choose; the heads are untrained."""
    target, draft = models(dtype)
    heads = specjax.MedusaAdapter.create(target, 2)
    heads = dataclasses.replace(heads, choices=((0,), (1,), (0, 0)))
    noise = jax.tree.map(
        lambda x: x + 0.05 * jax.random.normal(jax.random.key(1), x.shape, x.dtype), heads.params
    )
    other = dataclasses.replace(heads, params=noise)
    return {
        "lookup": BoundDrafter(specjax.NGram(4, min_ngram=1)),
        "draft": specjax.make_drafter(target, draft, num_drafts=3),
        "tree": specjax.make_drafter(target, draft, specjax.StaticTree, branching=(2, 1)),
        "medusa": specjax.MedusaBank.create({"one": heads, "two": other}),
    }


def engine(dtype: str = "float32", slots: int = 4, **changes: Any) -> Engine:
    """An engine with all of them."""
    settings = {"capacity": CAPACITY, "chunk": CHUNK, "logprobs": LOGPROBS, "waiting": 2**20}
    return Engine(models(dtype)[0], drafters(dtype), slots=slots, **{**settings, **changes})


@functools.cache
def text() -> list[int]:
    """Tokens to take prompts from."""
    source = pathlib.Path(specjax.__file__).parent / "tree.py"
    tokenizer = models()[0].tokenizer
    assert tokenizer is not None
    return tokenizer.encode(source.read_text()).ids


def request(seed: int) -> specjax.Request:
    """The request of a seed."""
    drawn, source = np.random.default_rng(seed), text()
    # Every third prompt begins like one of three others, so that its beginning is copied.
    shared = 400 * int(drawn.integers(3)) if drawn.random() < 0.4 else None
    head = [] if shared is None else source[shared : shared + int(drawn.choice([40, 70, 100]))]
    count, start = int(drawn.integers(1, 60)), int(drawn.integers(len(source) - 60))
    chosen = str(drawn.choice(["none", "lookup", "draft", "tree", "medusa", "lookup+medusa",
                               "lookup+draft"]))  # fmt: skip
    most = {"none": 0, "lookup": 4, "draft": 3, "lookup+draft": 3}.get(chosen, 2)
    penalised = drawn.random() < 0.2
    return specjax.Request(
        prompts=[head + source[start : start + count]],
        max_new_tokens=int(drawn.integers(1, NEW + 1)),
        proposer=chosen,
        num_drafts=None if drawn.random() < 0.5 else int(drawn.integers(most + 1)),
        adapter=str(drawn.choice(["one", "two"])) if "medusa" in chosen else None,
        temperature=float(drawn.choice([0.0, 0.7, 1.0, 1.3])),
        top_k=int(drawn.choice([0, 0, 5, 40])),
        top_p=float(drawn.choice([1.0, 1.0, 0.9])),
        min_p=float(drawn.choice([0.0, 0.05])),
        repetition_penalty=1.2 if penalised else 1.0,
        presence_penalty=0.3 if penalised else 0.0,
        logit_bias={7: 1.0} if penalised else None,
        min_new_tokens=1 if drawn.random() < 0.2 else 0,
        seed=int(drawn.integers(2**32)),
        stop=[["e", "\n"], ["def"], [], []][drawn.integers(4)],
        eos=[None, [], [5]][drawn.integers(3)],
        logprobs=LOGPROBS if drawn.random() < 0.2 else None,
    )


def result(served: Served) -> tuple[Any, ...]:
    """What may not depend on load: the text, its end, and the bits of its log-probabilities."""
    logprobs = served.logprobs and [x.tobytes() for x in jax.tree.leaves(served.logprobs)]
    return served.tokens, served.text, served.finish, logprobs


def under_load(
    made: Engine, seeds: list[int], order: np.random.Generator, cancelled: float, threads: int
) -> dict[int, Served]:
    """Submit all requests in a random order, between others that are cancelled."""

    def submit(seed: int) -> Handle:
        while True:
            try:
                return made.submit(request(seed))
            except Busy:
                time.sleep(0.01)

    def one(seed: int) -> tuple[int, Served | None]:
        neighbour = seed < 0
        handle = submit(abs(seed))
        if neighbour:
            if order.random() < 0.7:
                next(iter(handle), None)
            handle.cancel()
            assert handle.result(600).finish in ("cancelled", "eos", "stop", "limit")
            return seed, None
        return seed, handle.result(600)

    others = [-(seed + 2**40) for seed in seeds if order.random() < cancelled]
    every = order.permutation(np.array([*seeds, *others])).tolist()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return {seed: served for seed, served in pool.map(one, every) if served is not None}


def differences(
    made: Engine, seeds: list[int], served: dict[int, Served], generated: float
) -> tuple[list[str], collections.Counter[str]]:
    """Serve every request alone, and compare."""
    wrong, counts = [], collections.Counter[str]()
    target = made.target
    for number, seed in enumerate(seeds):
        asked = request(seed)
        if number % 4 == 3:
            # Another drafter does not change the text either.  It may change the last bits of the
            # log-probabilities: a node of a tree sums over the slots in another order.
            asked = dataclasses.replace(asked, proposer="none", num_drafts=None, adapter=None)
            counts["alone, without drafts"] += 1
            compared = 3
        else:
            counts["alone"] += 1
            compared = 4
        alone = result(made.submit(asked).result(600))[:compared]
        loaded = result(served[seed])[:compared]
        if alone != loaded:
            wrong.append(
                f"request {seed} depends on load: {loaded}, and alone {alone}: {request(seed)}"
            )
        if number < generated * len(seeds):
            plain = dataclasses.replace(request(seed), proposer="none", num_drafts=None)
            fields = {f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}
            fields |= {"adapter": None, "logprobs": None}
            output = specjax.generate(target, fields.pop("prompts"), **fields)
            counts["generate"] += 1
            if (output.tokens[0], output.text[0]) != (served[seed].tokens, served[seed].text):
                wrong.append(f"the text of request {seed} is not that of generate")
    return wrong, counts


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--cancelled", type=float, default=0.1, help="the share of more requests")
    parser.add_argument(
        "--generated", type=float, default=0.02, help="the share that generate decodes, too"
    )
    parser.add_argument(
        "--mesh", default="", metavar="data=D,model=M", help="so many virtual devices"
    )
    parser.add_argument(
        "--pages", type=int, help="of 16 tokens for all slots; they run out with fewer than 12 each"
    )
    parser.add_argument("--chunk", type=int, default=CHUNK, help="the most tokens of a pass")
    asked = parser.parse_args(argv)
    paged = {} if asked.pages is None else {"cache_tokens": 16 * asked.pages, "page": 16}
    if asked.mesh:
        MESH.update(parse_mesh(asked.mesh))
        # JAX has not looked for devices yet.
        count = f"--xla_force_host_platform_device_count={math.prod(MESH.values())}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {count}"
    order = np.random.default_rng(asked.seed)
    total, wrong = collections.Counter[str](), []
    for slots in asked.slots:
        count = asked.requests // len(asked.slots)
        seeds = [(asked.seed << 32) + slots * 10**6 + number for number in range(count)]
        with engine(asked.dtype, slots, chunk=asked.chunk, **paged) as made:
            compiled, began = made.compiled(), time.perf_counter()
            served = under_load(made, seeds, order, asked.cancelled, asked.threads)
            loaded = time.perf_counter()
            assert sorted(served) == sorted(seeds), "a request was lost"
            state = made.load()
            found, counts = differences(made, seeds, served, asked.generated)
            alone = time.perf_counter()
            end = made.load()
            assert end.running == 0, "a slot did not come back"
            assert end.free_pages == end.pages == (asked.pages or 0), "a page did not come back"
            assert made.compiled() == compiled, "the engine compiled under load"
        for line in found:  # at once, since a campaign may be stopped
            print(line, flush=True)
        wrong += found
        total += counts
        total["cancelled neighbours"] += state.cancelled
        total["prompt tokens copied"] += state.copied_tokens
        total["rows that gave their pages back"] += state.set_back
        print(
            f"{slots} slots: {count} requests in {loaded - began:.1f} s under load, "
            f"{alone - loaded:.1f} s alone; host {state.host_share:.3f}",
            flush=True,
        )
    print("| compared with | requests |\n|---|---|")
    for name, number in sorted(total.items()):
        print(f"| {name} | {number} |")
    print(f"| differences | {len(wrong)} |")
    assert not wrong, f"{len(wrong)} texts depend on load"


if __name__ == "__main__":
    main()
