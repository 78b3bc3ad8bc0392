"""The property laws find planted faults: each fault of the table breaks the law that it names.

An index clipped at 15 breaks no tree of 16 nodes, which is why the laws draw trees of 64.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import test_properties_caches as caches
import test_properties_sampling as samplings
import test_properties_steps as steps
import test_properties_training as training
import test_properties_trees as trees_
from hypothesis import Phase, settings
from properties import law
from toys import TABLES, TRANSFORMERS, Toys

from specjax import sampling, tree
from specjax.caches import KVCache
from specjax.options import files
from specjax.training import ordering
from specjax.training.optimizer import phases

Patch = pytest.MonkeyPatch


def clip(path: Any) -> Any:
    return jnp.minimum(path, 15)


def index_of_a_commit(patch: Patch) -> None:
    """The cache moves the token of node 15 in place of any node after it."""
    keep = KVCache._keep
    patch.setattr(KVCache, "_keep", lambda self, path: keep(self, clip(path)))


def path_of_a_tree(patch: Patch) -> None:
    """The path of a node ends at 15."""
    of = tree.Tree.of

    def clipped(*arguments: Any) -> tree.Tree:
        record = of(*arguments)
        return dataclasses.replace(record, path=clip(record.path))

    patch.setattr(tree.Tree, "of", staticmethod(clipped))


def deeper_window(patch: Patch) -> None:
    """A token sees one token more than its window."""
    visible = KVCache.visible

    def wider(self: Any, positions: Any, mask: Any = None, window: Any = None) -> Any:
        return visible(self, positions, mask, None if window is None else window + 1)

    patch.setattr(KVCache, "visible", wider)


def window_of_a_chain(patch: Patch) -> None:
    """A node of a tree counts as far from its text as its index, and not as its depth."""
    visible = KVCache.visible

    def flat(self: Any, positions: Any, mask: Any = None, window: Any = None) -> Any:
        index = self.length[:, None] + jnp.arange(positions.shape[1])
        return visible(self, index, mask, window)

    patch.setattr(KVCache, "visible", flat)


def ties_of_top_p(patch: Patch) -> None:
    """Several tokens that tie with the last one kept are dropped by top-p, if others are left."""
    threshold = sampling._threshold

    def fewer(x: Any, terms: Callable[..., Any], wanted: Any) -> Any:
        least = threshold(x, terms, wanted)
        if "of_top_p" not in terms.__qualname__:
            return least
        tied, kept = (
            (found(x, least)).sum(-1, keepdims=True) for found in (jnp.equal, jnp.greater)
        )
        return jnp.where((tied > 1) & (kept > 0), jnp.nextafter(least, jnp.inf), least)

    patch.setattr(sampling, "_threshold", fewer)


def late_peak(patch: Patch) -> None:
    """Every rate comes one step late."""
    made = training.make_schedule
    patch.setattr(
        training, "make_schedule", lambda o: lambda step: made(o)(jnp.maximum(step, 1) - 1)
    )


def high_peak(patch: Patch) -> None:
    """The warm-up goes one step beyond the peak."""
    made = training.make_schedule
    patch.setattr(
        training,
        "make_schedule",
        lambda o: lambda step: made(o)(step) * jnp.where(step == phases(o)[0], 1.01, 1),
    )


def starving_share(patch: Patch) -> None:
    """Every four rows are rounded alone, so a share of less than half a sequence gets nothing."""

    turns = ordering.turns

    def rounded(number: int, weights: Any) -> tuple[int, int]:
        return turns(number % 4, weights)[0], number

    patch.setattr(ordering, "turns", rounded)


def lost_option(patch: Patch) -> None:
    """A YAML file loses an option that a job can do without."""
    read = files._read

    def shorter(path: Any) -> dict[str, object]:
        values = read(path)
        lost = next((name for name in values if name not in ("data", "target")), None)
        return {n: x for n, x in values.items() if n != lost or path.suffix != ".yaml"}

    patch.setattr(files, "_read", shorter)


def cache(case: str) -> Callable[[], None]:
    return functools.partial(caches.test_a_cache_is_a_list_of_tokens, case)


def whole_steps(toys: Toys) -> Callable[[], None]:
    return lambda: steps.test_a_step_accepts_the_right_path_of_any_tree("match", toys)


def options_of_distillation() -> None:
    training.test_options_come_back_from_every_way_to_write_them(training.DistillOptions)


RATES = training.test_a_learning_rate_stays_below_its_peak_and_never_jumps
FAULTS: dict[str, tuple[Callable[[Patch], None], Callable[[], None]]] = {
    "commit's index clipped at 15": (index_of_a_commit, cache("kv")),
    "commit's index clipped at 15, in a ring": (index_of_a_commit, cache("ring")),
    "commit's index clipped at 15, in a step": (index_of_a_commit, whole_steps(TRANSFORMERS)),
    "paths of a tree clipped at 15": (
        path_of_a_tree, lambda: trees_.test_the_arrays_of_a_tree_are_those_of_a_walk(17, 9),
    ),
    "paths of a tree clipped at 15, in a step": (path_of_a_tree, whole_steps(TABLES)),
    "window one deeper than it is": (deeper_window, cache("window")),
    "window of a ring one deeper than it is": (deeper_window, cache("ring")),
    "window by index in the tree": (window_of_a_chain, cache("window")),
    "top-p drops a token that ties": (
        ties_of_top_p, samplings.test_a_warp_keeps_the_tokens_that_numpy_keeps,
    ),
    "peak one step late": (late_peak, RATES),
    "peak too high": (high_peak, RATES),
    "a share that starves": (starving_share, training.test_every_source_gets_its_share),
    "an option lost in YAML": (lost_option, options_of_distillation),
}  # fmt: skip
"""A fault, and the law that must break."""


COMPILED = (
    (caches, "staged", ()),
    (caches, "commit_path", ()),
    (trees_, "arrays_of", (1,)),
    (samplings, "warp", ()),
)
"""What the laws keep compiled, perhaps without the fault, and the static arguments of each."""


def again(compiled: Any, static: tuple[int, ...]) -> Any:
    """The same function, not compiled yet."""
    function = compiled.__wrapped__
    return jax.jit(lambda *arguments: function(*arguments), static_argnums=static)


def short(examples: int) -> settings:
    """The first example that fails is enough; smaller ones would take seconds."""
    return settings(law(examples), phases=[Phase.generate])


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_breaks_its_law(name, monkeypatch):
    """Without the fault the law holds: its own file is a part of the same run."""
    plant, broken = FAULTS[name]
    plant(monkeypatch)
    for module, compiled, static in COMPILED:
        monkeypatch.setattr(module, compiled, again(vars(module)[compiled], static))
    for module in (caches, samplings, steps, trees_, training):
        monkeypatch.setattr(module, "law", short)
    with pytest.raises(AssertionError):
        broken()
