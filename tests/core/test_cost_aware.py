"""`CostAware` keeps the drafts that pay, and the target reads no more tokens than it must."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import TABLES as toys
from watched import Watched

import specjax
from specjax import RULES, BestFirst, Decoder
from specjax.contract import Context, Proposer
from specjax.proposers import CostAware, CostAwareParams
from specjax.types import ABSENT, Proposal

INNER = toys.CASES["best first"]


@dataclasses.dataclass(frozen=True)
class Given(Proposer):
    """Proposes what its parameters are."""

    num_nodes: int
    max_depth = 5
    is_chain = False
    estimates = True

    def init(self, params, prompt, capacity):
        return ()

    def observe(self, params, state, block):
        return state

    def propose(self, params, state, context):
        return params, state


def trees(rng: np.random.Generator, rows: int, size: int) -> Proposal:
    """Random trees in which a chance is at most the parent's and the last sibling's."""
    parent, chance = np.full((rows, size), ABSENT), np.ones((rows, size))
    for row in range(rows):
        last: dict[int, float] = {}
        for node in range(1, size):
            if node > 2 and rng.random() < 0.1:
                chance[row, node] = 0.4  # an absent node, whose chance means nothing
                continue
            above = [n for n in range(node) if n == 0 or parent[row, n] != ABSENT]
            up = int(rng.choice(above))
            # Chances of float32 may be equal.
            share = rng.choice([1.0, 0.5, rng.random()])
            chance[row, node] = last[up] = np.float32(share) * last.get(up, chance[row, up])
            parent[row, node] = up
    tokens = rng.integers(0, 50, (rows, size))
    logits = rng.normal(size=(rows, size, 3))
    arrays = map(jnp.asarray, (tokens, parent, logits))
    return Proposal(*arrays, chance=jnp.asarray(chance, jnp.float32))


def kept(
    parent: np.ndarray, chance: np.ndarray, widths: tuple[int, ...], seconds: list[float],
    shared: bool,
):  # fmt: skip
    """The nodes that one row keeps, by a search over widths, or by going on while that may pay."""
    ranked = sorted(
        (n for n in range(1, len(parent)) if parent[n] != ABSENT and chance[n] > 0),
        key=lambda n: (-chance[n], n),
    )
    if not shared:
        chances = [1.0, *(chance[n] for n in ranked), *[0.0] * len(parent)]
        for at, width in enumerate(widths):
            known, next_one = sum(chances[:width]), chances[width]
            hopes = (
                (known + (wider - width) * next_one) / cost
                for wider, cost in zip(widths[at + 1 :], seconds[at + 1 :], strict=True)
            )
            if max(hopes, default=0.0) <= known / seconds[at] * (1 + 1e-6):
                return sorted(ranked[: width - 1])
    best, nodes = -1.0, []
    for width, cost in zip(widths, seconds, strict=True):
        taken = ranked[: width - 1]
        rate = (1 + sum(chance[n] for n in taken)) / cost
        if rate > best * (1 + 1e-6):
            best, nodes = rate, taken
    return sorted(nodes)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "seconds", [[1, 1.2137, 1.5291, 2.0173], [1, 1.01, 1.02, 1.03], [1, 3, 5, 9]]
)
def test_the_width_of_most_tokens_a_second(seconds, shared):
    """The kept nodes are the best ones, come first, and keep order, parents and logits."""
    widths = (1, 3, 6, 12)
    given = trees(np.random.default_rng(4), 200, 12)
    context = Context(given.tokens[:, 0], None, None, shared, True, None)
    params = CostAwareParams(given, jnp.array(seconds, jnp.float32))
    made, _ = CostAware(Given(12), widths).propose(params, (), context)
    made, given = jax.device_get((made, given))
    sizes = set()
    for row in range(200):
        nodes = [0, *kept(given.parent[row], given.chance[row], widths, seconds, shared)]
        size = len(nodes)
        sizes.add(size)
        np.testing.assert_array_equal(made.tokens[row, :size], given.tokens[row, nodes])
        np.testing.assert_array_equal(made.logits[row, :size], given.logits[row, nodes])
        wanted = [nodes.index(given.parent[row, n]) for n in nodes[1:]]
        assert made.parent[row].tolist() == [ABSENT, *wanted, *[ABSENT] * (12 - size)]
    assert len(sizes) > 1 or seconds[1] == 3


def test_the_target_reads_the_narrowest_width():
    """Costs choose the widths, other costs need no other program, and the text stays the same."""
    proposer, widths = INNER[0], (1, 2, 5, 9)
    target = Watched(toys.model())
    dec = Decoder(target, CostAware(proposer, widths), RULES["match"](), (), toys.CAPACITY)
    chosen, texts = [], []
    some = [[1, 1 + cost, 1 + 3 * cost, 1 + 6 * cost] for cost in (0.1, 0.2, 0.3, 0.4)]
    for seconds in ([1, 9, 9, 9], [1, 1, 1, 1], [9, 1, 1, 9], *some):
        arrays = specjax.Params(
            toys.weights(), CostAwareParams(INNER[1], jnp.array(seconds, jnp.float32))
        )
        traced = len(target.traced)
        state = toys.prefill(dec, arrays, rows=[0])
        target.widths.clear()
        state = dec.run(arrays, state)
        jax.effects_barrier()
        chosen.append(set(target.widths))
        texts.append(toys.texts(state))
        assert not chosen[1:] or len(target.traced) == traced
    assert chosen[:2] == [{1}, {9}]
    assert chosen[2] <= {2, 5}
    assert set().union(*chosen) <= set(widths) and max(map(len, chosen)) > 1
    assert all(text == [toys.decoded("none", "match")[0][0]] for text in texts)


def test_costs_are_measured():
    """One number for each width, ascending."""
    target = specjax.LanguageModel(toys.model(), toys.weights(), name="toy")
    drafter = specjax.Drafter(INNER[0], INNER[1], name="heads")
    with pytest.raises(ValueError, match=r"needs \d+: pass a drafter of less depth"):
        specjax.step_costs(target, drafter, (1, 4, 9))
    model = dataclasses.replace(toys.model(), max_positions=256)
    long = specjax.LanguageModel(model, toys.weights(), name="toy")
    costs = specjax.step_costs(long, drafter, (1, 9), rounds=1)
    assert list(costs) == [1, 9] and 0 < costs[1] <= costs[9]


def test_what_cannot_be_is_refused():
    drafter = specjax.Drafter(INNER[0], INNER[1], name="heads")
    chain = specjax.Drafter(toys.CASES["draft 3"][0], name="draft")
    for seconds, words in (
        ({1: 1.0, 9: 0.0}, r"seconds\[9\]=0.0; it must be greater than 0, the time of a step"),
        ({1: 1.0, 9: float("inf")}, r"seconds\[9\]=inf"),
        ({1: 1.0, 8: 2.0}, r"widths=\(1, 8\); .* the last of which is 9"),
        ({0: 1.0, 9: 2.0}, "from 1"),
    ):
        with pytest.raises(ValueError, match=words):
            specjax.cost_aware(drafter, seconds)
    with pytest.raises(ValueError, match="Chain does not estimate the chances"):
        specjax.cost_aware(chain, {1: 1.0, 4: 2.0})
    with pytest.raises(ValueError, match="drafter=<a BestFirst>; pass what load_drafter returns"):
        specjax.cost_aware(INNER[0], {1: 1.0, 9: 2.0})
    with pytest.raises(ValueError, match="batch=0"):
        specjax.step_costs(None, drafter, (1, 9), batch=0)
    assert isinstance(INNER[0], BestFirst)
