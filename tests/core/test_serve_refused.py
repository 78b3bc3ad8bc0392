"""Engines that are refused, and one whose device breaks."""

from __future__ import annotations

import load
import pytest
from toys import TABLES as toys

import specjax
from specjax import Request
from specjax.methods import BoundDrafter
from specjax.models import LanguageModel
from specjax.proposers import Chain
from specjax.serve import Closed, Engine


def test_a_broken_device_leaves_nobody_waiting(monkeypatch):
    target = LanguageModel(toys.model(), toys.weights(), None, (), "toy")
    made = Engine(target, slots=1, capacity=48, chunk=16)

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(made._device, "run", broken)
    handle = made.submit(Request(prompts=[[1]], max_new_tokens=4))
    with pytest.raises(Closed, match="out of memory"):
        handle.result(30)
    with pytest.raises(Closed, match="has stopped"):
        made.submit(Request(prompts=[[1]]))


def test_slots_that_do_not_divide_are_refused(monkeypatch):
    """Before anything is compiled; the mesh of one device stands in for one of two along `data`."""
    monkeypatch.setattr("specjax.serve.engine.row_parts", lambda mesh: 2)
    target = specjax.load(load.TINY / "target", mesh=specjax.make_mesh())
    with pytest.raises(ValueError, match=r"slots=3 do not divide among the 2 .*: pass slots=4"):
        Engine(target, slots=3)


def test_refused_engines():
    """Before anything is compiled."""
    target, draft = load.models()
    early = specjax.EarlyExit(target.model, 1)
    for arguments, message in [
        ({"target": 3}, "target=3, of the type int; pass what specjax.load"),
        ({"slots": 0}, "slots=0"),
        ({"capacity": 1}, "capacity=1"),
        ({"waiting": -1}, "waiting=-1"),
        ({"chunk": 0}, "chunk=0"),
        ({"logprobs": 1000}, r"logprobs=1000.*\[0, 512\]"),
        ({"drafters": [1]}, "pass a dict"),
        ({"constraint_size": 5}, "pass states and classes"),
        ({"constraint_size": (0, 5)}, "constraint_size=0"),
        ({"default": "draft"}, "default='draft' is not a drafter"),
        ({"drafters": {"none": BoundDrafter(specjax.NGram())}}, "'none', which is plain"),
        ({"drafters": {"a+b": BoundDrafter(specjax.NGram())}}, "without"),
        ({"drafters": {"a": specjax.NGram()}}, "=<a NGram>; pass what"),
        ({"drafters": {"a": specjax.adaptive(lookup=specjax.NGram(3))}}, "for a whole batch"),
        ({"drafters": {"a": specjax.first_of(specjax.NGram(3), specjax.NGram(3))}}, "first_of|its"),
        ({"drafters": {"a": BoundDrafter(early)}}, "target's cache"),
        ({"drafters": {"a": BoundDrafter(specjax.NoProposer())}}, "drafts nothing"),
    ]:
        with pytest.raises(ValueError, match=message):
            Engine(**{"target": target, **arguments})
    other = LanguageModel(toys.model(), toys.weights(), None, (), "toy")
    with pytest.raises(ValueError, match=r"for a target|other models|made for"):
        Engine(other, {"medusa": load.drafters()["medusa"]})
    assert isinstance(load.drafters()["draft"].proposer, Chain) and draft is not None
