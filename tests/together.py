"""Run as one of several processes of one engine, for `tests/process/test_together.py`:

python tests/together.py MESH HOST:PORT COUNT ID FAULT

Process 0 prints the tokens of each request as JSON.  FAULT is none, or what happens to a message of
process 0 in the middle: lost, moved, repeated or changed.
"""

from __future__ import annotations

import json
import pathlib
import pickle
import sys

import jax

import specjax
from specjax.drafters import drafter_by_name
from specjax.parallel import leaving, parse_mesh
from specjax.parallel.processes import join
from specjax.serve import Engine, decisions

TINY = pathlib.Path(__file__).parent.parent / "checkpoints" / "tiny"
SETTINGS = (
    {"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "top_k": 50},
    {"temperature": 0.8, "seed": 4, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 1.0, "seed": 5, "stop": ["e", "\n"]},
    {"temperature": 1.0, "seed": 6, "constraint": specjax.Regex("[a-z ]{4,30}")},
)  # fmt: skip
PROMPTS = ("def main(", "import os\nimport sys\nfrom typing import Any\n" * 3, "class A:")
DRAFTERS = ("none", "lookup", "draft", "lookup+draft")


def asked() -> list[specjax.Request]:
    return [
        specjax.Request(
            prompts=prompt, max_new_tokens=20, proposer=DRAFTERS[(n + m) % len(DRAFTERS)],
            logprobs=m % 2 or None, **settings,
        )
        for n, prompt in enumerate(PROMPTS)
        for m, settings in enumerate(SETTINGS)
    ]  # fmt: skip


def engine(mesh: jax.sharding.Mesh | None) -> Engine:
    target = specjax.load(TINY / "target", "float32", mesh=mesh)
    draft = specjax.load(TINY / "draft", "float32")
    drafters = {
        "lookup": drafter_by_name("ngram", target),
        "draft": specjax.make_drafter(target, draft, num_drafts=3),
    }
    return Engine(
        target, drafters, slots=4, capacity=128, chunk=32, constraint_size=(256, 160), logprobs=1
    )


def spread(devices: int = 2) -> Engine:
    """An engine of few programs over so many devices, wherever they are: it starts quickly."""
    target = specjax.load(TINY / "target", "float32", mesh=specjax.make_mesh(model=devices))
    return Engine(
        target, {"lookup": drafter_by_name("ngram", target)}, slots=4, capacity=128, chunk=32
    )


def texts(made: Engine) -> list[list[int]]:
    """All at once, twice: the second time beginnings of prompts are copied; some are cancelled."""
    for request in asked()[:3]:
        handle = made.submit(request)
        next(iter(handle), None)
        handle.cancel()
    handles = [made.submit(request) for request in asked() * 2]
    served = [handle.result(300) for handle in handles]
    for one in served:
        assert one.logprobs is None or len(one.logprobs.raw) == len(one.tokens)
    assert sum(one.logprobs is not None for one in served) == len(served) * 2 // 5
    return [one.tokens for one in served]


class Planted(decisions.Sender):
    """Does something to message 9."""

    fault = "none"
    _kept: decisions.Message | None = None

    def _write(self, message: decisions.Message) -> None:
        if message.body and message.number == 9:
            if self.fault == "lost":
                return
            if self.fault == "changed":
                name, *arguments = pickle.loads(message.body)[0]
                body = pickle.dumps([(name, *arguments), ("run", (1, [True] * 4))])
                message = message._replace(body=body)
            if self.fault == "moved":
                self._kept = message
                return
        super()._write(message)
        if message.body and message.number == 9 and self.fault == "repeated":
            super()._write(message)
        if self._kept is not None and message.number == 10:
            super()._write(self._kept)


def main() -> None:
    mesh, coordinator, count, number, fault = sys.argv[1:]
    join(coordinator, int(count), int(number))
    with leaving():
        Planted.fault = fault
        decisions.Sender = Planted
        made = engine(specjax.make_mesh(**parse_mesh(mesh)))
        if made.follows:
            made.follow()
            return
        with made:
            print(json.dumps(texts(made)), flush=True)


if __name__ == "__main__":
    main()
