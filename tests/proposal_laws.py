"""What proposers over a draft model draft, against drafting without caches, masks and batches.

A subclass names the toys and the pairs of a case and a rule.  The small draft is the target without
its last layer, and an early exit drafts what it drafts.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import trees
from over import over
from toys import Toys

from specjax import RULES, Decoder, Sampling, warp

STEPS = 4
TEMPERATURE = [1.0, 0.0, 0.7, 1.0]


@functools.cache
def steps(toys: Toys, case: str, rule: str, modulus: int = Toys.VOCAB) -> list[tuple[Any, Any]]:
    """The first steps of a case: the state before each, and the proposal. A small `modulus`
    makes prompts repeat."""
    dec, arrays = toys.decoder(case, rule), toys.params(case)
    step, taken = jax.jit(dec.step), []
    state = toys.prefill(dec, arrays, temperature=TEMPERATURE, prompt=toys.PROMPTS % modulus)
    for _ in range(STEPS):
        after, info = step(arrays, state)
        taken.append((state, jax.device_get(info.proposal)))
        state = after
    return taken


def text_of(state: Any, row: int) -> list[int]:
    return np.asarray(state.tokens)[row, : int(state.length[row])].tolist()


@functools.cache
def _plain(toys: Toys, tokens: bytes) -> np.ndarray:
    read = np.frombuffer(tokens, np.int32)[None]
    return toys.plain_logits(read, toys.model(num_layers=1), toys.truncated())[0]


def logits_after(toys: Toys, text: list[int]) -> np.ndarray:
    """[V] of the small draft after a text, in a plain pass."""
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(text)] = text
    return _plain(toys, padded.tobytes())[len(text) - 1]


@functools.cache
def warped(logits: bytes, temperature: float) -> np.ndarray:
    values = np.frombuffer(logits, np.float32)[None, None]
    return np.asarray(_warp(values, Sampling.create(1, temperature)))[0, 0]


_warp = jax.jit(warp)


@functools.partial(jax.jit, static_argnums=0)
def _drawn(dec: Decoder, state: Any) -> Any:
    return dec._draw(state)


@jax.jit
def _gumbel(key: Any, position: Any) -> Any:
    return jax.random.gumbel(jax.random.fold_in(key, position), (Toys.VOCAB,), jnp.float32)


@jax.jit
def _own_noise(draw: Any, row: Any, node: Any, depth: Any) -> Any:
    return jax.tree.map(lambda x: x[row], draw).noise(node[None], depth[None])[0]


def noise(toys: Toys, state: Any, rule: str, row: int, node: int, depth: int) -> np.ndarray:
    """[V]: the noise with which the children of a node are drawn."""
    if RULES[rule].shared_noise:
        return np.asarray(_gumbel(state.key[row], int(state.length[row]) + depth))
    draw = _drawn(toys.decoder("none", rule), state)
    return np.asarray(_own_noise(draw, row, jnp.int32(node), jnp.int32(depth)))


def ranked(
    toys: Toys, state: Any, rule: str, row: int, path: Any, node: int, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that may follow a path, best first, and the scores of all tokens."""
    raw = logits_after(toys, [*text_of(state, row), *path])
    if temperature == 0:
        return np.argsort(-raw, kind="stable"), raw
    scores = warped(raw.tobytes(), temperature) + noise(toys, state, rule, row, node, len(path))
    return np.argsort(-scores, kind="stable"), scores


def softmax(logits: Any) -> np.ndarray:
    chances = np.exp(np.float64(logits) - np.max(logits))
    return chances / chances.sum()


class ProposalLaws:
    """The laws of one set of toys."""

    toys: Toys
    CONTRACTS: ClassVar[list[tuple[str, str]]]
    STATIC: ClassVar[list[tuple[str, str]]]
    DYNAMIC: ClassVar[list[tuple[str, str]]]
    CHAINS: ClassVar[list[tuple[str, str]]]
    BOUNDED: ClassVar[list[tuple[str, str]]]

    @over("CONTRACTS")
    def test_proposals_are_trees_of_distinct_siblings(self, case, rule):
        """Proposals are in topological order below a pending root, without orphans, excess depth or
        equal siblings."""
        proposer, there = self.toys.CASES[case][0], 0
        for state, proposal in steps(self.toys, case, rule):
            for row in range(self.toys.ROWS):
                tokens, parent = proposal.tokens[row], proposal.parent[row]
                assert len(tokens) == len(parent) == proposer.num_nodes
                assert parent[0] == -1
                assert tokens[0] == text_of(state, row)[-1]
                nodes = [n for n in range(len(parent)) if parent[n] >= 0]
                assert all(
                    parent[n] < n and (parent[n] == 0 or parent[parent[n]] >= 0) for n in nodes
                )
                assert all(len(trees.ancestors(parent, n)) - 1 <= proposer.max_depth for n in nodes)
                pairs = [(parent[n], tokens[n]) for n in nodes]
                assert len(set(pairs)) == len(pairs)
                there += len(nodes)
        assert there > STEPS * self.toys.ROWS // 2

    @over("STATIC")
    def test_siblings_of_a_static_tree_are_the_best_with_the_noise(self, case, rule):
        """Children are the top-k of logits + noise after the node's path, and the proposal has
        their distribution."""
        toys, proposer = self.toys, self.toys.CASES[case][0]
        for state, proposal in steps(toys, case, rule):
            for row in range(toys.ROWS):
                parent, tokens = proposal.parent[row], proposal.tokens[row]
                assert parent.tolist() == proposer.parent.tolist()
                for node in range(proposer.num_nodes):
                    children = np.flatnonzero(parent == node)
                    if len(children) == 0:
                        continue
                    path = tokens[trees.ancestors(parent, node)[1:]]
                    best, _ = ranked(toys, state, rule, row, path, node, TEMPERATURE[row])
                    assert tokens[children].tolist() == best[: len(children)].tolist()
                    if proposal.logits is not None:
                        raw = logits_after(toys, [*text_of(state, row), *path])
                        wanted = warped(raw.tobytes(), TEMPERATURE[row])
                        np.testing.assert_allclose(
                            proposal.logits[row, node], wanted, rtol=1e-4, atol=1e-4
                        )
            assert (proposal.logits is None) == RULES[rule].shared_noise
            assert not proposal.point_mass

    @over("DYNAMIC")
    def test_a_dynamic_tree_is_expanded_and_reranked(self, case, rule):
        """EAGLE-2 by hand: the best nodes of a level are expanded, and the best of all candidates
        are proposed."""
        toys, proposer, shapes = self.toys, self.toys.CASES[case][0], set()
        shared = RULES[rule].shared_noise
        for state, proposal in steps(toys, case, rule):
            assert (proposal.logits is None) == shared
            assert not proposal.point_mass
            for row in range(toys.ROWS):

                def children(path, value, number, row=row, state=state):
                    best, scores = ranked(toys, state, rule, row, path, number, TEMPERATURE[row])
                    if TEMPERATURE[row] > 0 and not shared:
                        raw = logits_after(toys, [*text_of(state, row), *path])
                        scores = warped(raw.tobytes(), TEMPERATURE[row])
                    chance = np.log(softmax(scores))
                    # Drafts that were drawn count by their rank, and not by their token.
                    counted = chance[best] if shared else np.sort(chance)[::-1]
                    return [
                        (value + counted[rank], (*path, int(best[rank])))
                        for rank in range(proposer.width)
                    ]

                level, candidates, number = [(0.0, ())], [], 0
                for _ in range(proposer.depth):
                    new = []
                    for value, path in level:
                        new += children(path, value, number)
                        number += 1
                    candidates += new
                    level = sorted(new, key=lambda one: -one[0])[: proposer.width]
                best = sorted(candidates, key=lambda one: -one[0])[: proposer.num_nodes - 1]
                wanted = {path for _, path in best}
                parent, tokens = proposal.parent[row], proposal.tokens[row]
                ways = [trees.ancestors(parent, n)[1:] for n in range(1, proposer.num_nodes)]
                assert {tuple(tokens[way].tolist()) for way in ways} == wanted
                shapes.add(tuple(parent.tolist()))
        assert len(shapes) > 2 or (case == "early exit dynamic tree" and len(shapes) == 2)

    @over("CHAINS")
    def test_a_chain_is_drawn_until_the_model_is_unsure(self, case, rule):
        """Each draft is drawn after the drafts before it; none follow the first one below the
        threshold."""
        toys, lengths = self.toys, set()
        threshold = toys.CASES[case][0].confidence_threshold
        for state, proposal in steps(toys, case, rule):
            for row in range(toys.ROWS):
                path = []
                for node in range(1, proposal.tokens.shape[1]):
                    assert proposal.parent[row, node] == node - 1
                    best, _ = ranked(toys, state, rule, row, path, node - 1, TEMPERATURE[row])
                    assert proposal.tokens[row, node] == best[0]
                    raw = logits_after(toys, [*text_of(state, row), *path])
                    path.append(int(best[0]))
                    if softmax(raw)[best[0]] < threshold:
                        break
                assert (proposal.parent[row, len(path) + 1 :] == -1).all()
                lengths.add(len(path))
        assert len(lengths) > 1 if threshold else lengths == {3}

    @over("BOUNDED")
    def test_a_row_bounds_its_own_drafts(self, case, rule):
        """The text and program are the same; a row with 0 drafts decodes plainly and is counted
        so."""
        toys, bounds = self.toys, np.array([3, 0, 1, 2], np.int32)
        dec, arrays = toys.decoder(case, rule), toys.params(case)
        state = dec.run(arrays, toys.prefill(dec, arrays, temperature=1.0, num_drafts=bounds))
        texts, free = toys.decoded(case, rule, 1.0)
        assert toys.texts(state) == texts
        passes, stats = np.asarray(state.stats.target_passes), state.stats
        assert passes[0] == free.stats.target_passes[0]
        assert passes[1] == stats.emitted[1] == 20 - toys.LENGTHS[1]
        assert [int(x[1]) for x in (stats.proposed, stats.tested, stats.accepted)] == [0, 0, 0]
        assert (np.asarray(stats.accepted) <= passes * bounds).all()
        assert (np.asarray(stats.tested) <= passes * bounds).all()
        assert 0 < stats.accepted[2] <= passes[2] < free.stats.emitted[2]
        if case == "draft 3":
            assert stats.proposed.tolist() == (passes * bounds).tolist()
        if case == "draft tree":
            assert stats.proposed.tolist() == (passes * np.array([12, 0, 3, 6])).tolist()
