"""The part of bench.overlap with real weights: two processes of one core each."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bench.command import Report
from bench.imposed import Imposed, Script, State, coins
from bench.overlap_options import OverlapOptions
from bench.weights import from_folders, random_folders
from specjax import Decoder, DraftModel, Match, NoProposer, Params, Sampling, make_key, make_mesh
from specjax.contract import Context
from specjax.measure import describe, interval, show
from specjax.overlap import Overlapped
from specjax.parallel import join_from
from specjax.types import Proposal

_PROMPT, _VOCAB = 32, 32000
_ROLES = ("sequential", "draft", "target")


@dataclasses.dataclass(frozen=True)
class Foreseen(Imposed):
    """`Imposed` whose guess of the next token is imposed, too.

    The best guess is the next imposed draft.  At every other position the second best is right.
    """

    separable = True

    def propose(self, params: Script, state: State, context: Context) -> tuple[Proposal, State]:
        position = jnp.minimum(state[1] + 1, params.text.shape[1] - 1)[:, None]
        text, right = (
            jnp.take_along_axis(x, position, axis=1) for x in (params.text, params.right)
        )
        best = jnp.where(right, text, (text + 1) % self.vocab_size)
        second = jnp.where(position % 2 == 0, text, (text + 2) % self.vocab_size)
        guess = 2 * jax.nn.one_hot(best, self.vocab_size)
        guess += jax.nn.one_hot(second, self.vocab_size)
        first = True

        def warp(logits: Array, path: Array | None = None) -> Array:
            nonlocal first
            if first:  # the barrier keeps the pass that the guess would need
                first = False
                logits = jax.lax.optimization_barrier((logits.astype(jnp.float32), guess))[1]
            return context.warp(logits, path)

        return super().propose(params, state, dataclasses.replace(context, warp=warp))


def measure(arguments: OverlapOptions) -> Report:
    """Run the sequential loop and then the two processes; print and return the figures."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise ValueError("--processes needs two cores")
    assert arguments.processes is not None
    random_folders(arguments.processes, _VOCAB, pathlib.Path(arguments.weights), "float32")
    with tempfile.TemporaryDirectory() as folder:
        given = [sys.executable, "-m", "bench.overlap_processes", folder]
        given += [arguments.processes, arguments.weights]
        names = ("alpha", "num_drafts", "outcomes", "new_tokens", "rounds")
        given += [json.dumps({name: getattr(arguments, name) for name in names})]
        both = f"{cores[0]},{cores[1]}"
        subprocess.run(["taskset", "-c", both, *given, "sequential", "0"], check=True)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        started = [
            subprocess.Popen(["taskset", "-c", str(core), *given, role, port])
            for core, role in zip(cores, _ROLES[1:], strict=True)
        ]
        if any(process.wait() for process in started):
            raise ValueError("a process failed: its message is above")
        found = {
            role: json.loads((pathlib.Path(folder) / f"{role}.json").read_text())
            for role in ("sequential", "draft")
        }
    ratio = interval(found["sequential"]["seconds"], found["draft"]["seconds"])
    print(
        f"speed-up {show(ratio, '.2f')}; sequential "
        f"{1e3 * np.mean(found['sequential']['seconds']):.1f} ms a step, overlapped "
        f"{1e3 * np.mean(found['draft']['seconds']):.1f}; hits {found['draft']['hits']}, "
        f"ways by seconds {found['draft']['ways']}"
    )
    return {"machine": describe(), "speedup": ratio, **found}


def child(folder: str, size: str, where: str, numbers: str, role: str, port: str) -> None:
    """The work of one process."""
    given = OverlapOptions(**json.loads(numbers))
    out = pathlib.Path(folder)
    if role != "sequential":
        names = ("coordinator", "num_processes", "process_id")
        given_names = (f"localhost:{port}", 2, _ROLES.index(role) - 1)
        join_from(dict(zip(names, given_names, strict=True)))
    pair = from_folders(*random_folders(size, _VOCAB, pathlib.Path(where), "float32"), "float32")
    assert pair.draft is not None
    target, draft, new = pair.target, pair.draft, given.new_tokens
    capacity, width = _PROMPT + new, given.num_drafts + 1
    prompt = np.random.default_rng(0).integers(0, _VOCAB, (1, _PROMPT)).astype(np.int32)

    def start(runner: Any, params: Params) -> Any:
        settings: dict[str, Any] = {"limit": np.array([capacity], np.int32)}
        settings["sampling"] = Sampling.create(1, 0.0)
        settings["key"] = jax.random.split(make_key(0), 1)
        return runner.prefill(params, prompt, np.array([_PROMPT], np.int32), **settings)

    written = out / "text.npy"
    if role == "sequential":
        plain = Decoder(target.model, NoProposer(width), Match(), (), capacity)
        params = Params(target.params)
        np.save(written, np.asarray(plain.run(params, start(plain, params)).tokens)[:, :capacity])
    text = np.load(written)
    right = coins(1, new, given.alpha, [given.num_drafts])
    script = Script(
        draft.params,
        jnp.pad(text, ((0, 0), (0, width))),
        jnp.pad(right, ((0, 0), (_PROMPT, width))),
    )
    chain = DraftModel(draft.model, _VOCAB, given.num_drafts)
    proposer = Foreseen(chain, _VOCAB)
    decoder = Decoder(target.model, proposer, Match(), (), capacity)
    runner: Any = decoder
    params = Params(target.params, script)
    if role != "sequential":
        meshes = [make_mesh(devices=[device]) for device in jax.devices()]
        runner = Overlapped(decoder, *meshes, outcomes=given.outcomes)
        params = runner.place(params)
    seconds, hits = [], None
    for number in range(-2, given.rounds):
        state = jax.block_until_ready(start(runner, params))
        started = time.perf_counter()
        state = jax.block_until_ready(runner.run(params, state))
        spent = time.perf_counter() - started
        np.testing.assert_array_equal(np.asarray(state.tokens)[:, :capacity], text)
        passes = int(np.asarray(state.stats.target_passes)[0])
        if number >= 0:
            seconds.append(spent / passes)
        if role != "sequential":
            hits = runner.hit_rates(state)
    ways = [runner.pace.seconds(n) for n in range(3)] if role == "draft" else None
    found = {"seconds": seconds, "hits": hits, "ways": ways}
    (out / f"{role}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    child(*sys.argv[1:])
