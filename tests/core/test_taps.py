"""Taps: the layers of the target that a proposer reads, in prompts and in every committed block."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import own_models
import pytest
from flax import struct
from jax import Array
from toys import TABLES as toys
from toys import TRANSFORMERS

from specjax import RULES, Decoder, NoProposer
from specjax.caches import prefill
from specjax.contract import Context, Proposer
from specjax.models.layers import Norm
from specjax.models.transformer import Layer
from specjax.types import Block, Proposal

NET = toys.model()
TAPS = (2, 0)  # out of order: features are concatenated in the order of the taps
SIZE = 32 * len(TAPS)


def places(tokens):
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


@jax.jit
def streams(params, tokens):
    """[B, T] -> three [B, T, E]: the residual streams, captured by Flax's own intermediates."""
    net = TRANSFORMERS.model()
    _, captured = net.module.apply(
        {"params": params},
        tokens,
        places(tokens),
        capture_intermediates=lambda module, name: isinstance(module, Layer) and name == "__call__",
        mutable=["intermediates"],
    )
    layers = [captured["intermediates"][f"layer_{i}"]["__call__"][0][0] for i in range(2)]
    normed = Norm(net.module.config).apply({"params": params["norm"]}, layers[1])
    return [params["embedding"][tokens], *layers], normed


def test_features_are_the_residual_streams():
    """Tap 0 is the embedding, tap i the output of layer i, and the last one the hidden state after
    the final norm."""
    net, tokens = TRANSFORMERS.model(), jnp.asarray(toys.greedy_texts()[:2])
    every, normed = jax.device_get(streams(TRANSFORMERS.weights(), tokens))
    assert net.num_taps == 4

    @jax.jit
    def read(params):
        return [net.apply(params, tokens, places(tokens), taps=taps) for taps in tapped]

    tapped = ((0,), (1,), (2, 0), (0, 1, 2), (3,))
    *inner, last = read(TRANSFORMERS.weights())
    np.testing.assert_array_equal(last.features, last.hidden)
    for taps, out in zip(tapped, inner, strict=False):
        wanted = np.concatenate([every[tap] for tap in taps], axis=-1)
        np.testing.assert_allclose(out.features, wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(normed, out.hidden, rtol=1e-4, atol=1e-4)


@struct.dataclass
class RecordedState:
    inner: Any
    features: Array  # [B, capacity + D + 1, sum E] of the committed tokens
    length: Array  # [B]


@dataclasses.dataclass(frozen=True)
class Recorder(Proposer):
    """`inner`, which also records the features of everything that was committed."""

    inner: Proposer

    def __post_init__(self):
        inner = self.inner
        self.declare(
            num_nodes=inner.num_nodes,
            max_depth=inner.max_depth,
            is_chain=inner.is_chain,
            narrower=inner.narrower,
            point_mass=inner.point_mass,
            taps=TAPS,
        )

    def init(self, params: Any, prompt: Block, capacity: int) -> RecordedState:
        features = jnp.zeros((len(prompt.count), capacity + self.max_depth + 1, SIZE))
        return RecordedState(self.inner.init(params, prompt, capacity), features, prompt.count)

    def read(self, params: Any, state: RecordedState, block: Block) -> RecordedState:
        inner = self.inner.read(params, state.inner, block)
        return dataclasses.replace(self.observe(params, state, block), inner=inner)

    def propose(
        self, params: Any, state: RecordedState, context: Context
    ) -> tuple[Proposal, RecordedState]:
        proposal, inner = self.inner.propose(params, state.inner, context)
        return proposal, dataclasses.replace(state, inner=inner)

    def observe(self, params: Any, state: RecordedState, block: Block) -> RecordedState:
        write = jax.vmap(
            lambda all_, new, at: jax.lax.dynamic_update_slice_in_dim(all_, new, at, axis=0)
        )
        features = write(state.features, block.features, state.length)
        return RecordedState(
            self.inner.observe(params, state.inner, block), features, state.length + block.count
        )


@jax.jit
def plain_features(params, tokens):
    return NET.apply(params, tokens, places(tokens), taps=TAPS).features


@pytest.mark.parametrize(
    ("case", "rule", "chunk"),
    [("table chain", "match", prefill.CHUNK), ("table static tree", "rejection", 3)],
)
def test_a_proposer_meets_the_features_of_all_that_is_committed(case, rule, chunk, monkeypatch):
    """Features arrive for chunked prompts and for every accepted path, and the text is
    unchanged."""
    monkeypatch.setattr(prefill, "CHUNK", chunk)
    proposer, arrays = toys.CASES[case][0], toys.params(case)
    # Each chunk needs another capacity: jit finds programs by decoder, which does not know the
    # chunk.
    dec = Decoder(NET, Recorder(proposer), RULES[rule](), (toys.EOS,), toys.CAPACITY + chunk % 2)
    state = dec.run(arrays, toys.prefill(dec, arrays, temperature=1.0))
    assert toys.texts(state) == toys.decoded(case, rule, 1.0)[0]
    assert state.stats.accepted.sum() > 2
    # Behind the text stand tokens of a cut block, which no earlier token sees.
    text = jnp.asarray(state.tokens[:, : toys.CAPACITY])
    wanted = np.asarray(plain_features(toys.weights(), text))
    np.testing.assert_array_equal(state.proposer.length, state.length - 1)
    for row, length in enumerate(np.asarray(state.proposer.length)):
        np.testing.assert_array_equal(state.proposer.features[row, :length], wanted[row, :length])


def test_without_taps_there_is_nothing_to_pay():
    """A pass has no further outputs, and a decoder commits no features."""
    tokens = jnp.asarray(toys.PROMPTS)
    out = jax.eval_shape(lambda: NET.apply(toys.weights(), tokens, places(tokens)))
    assert out.features is None
    program = jax.make_jaxpr(lambda t: NET.apply(toys.weights(), t, places(t)))(tokens)
    assert len(program.out_avals) == 2  # logits and hidden states
    more = jax.make_jaxpr(lambda t: NET.apply(toys.weights(), t, places(t), taps=TAPS))(tokens)
    assert len(more.out_avals) == 3
    assert len(more.eqns) > len(program.eqns)

    seen = []

    @dataclasses.dataclass(frozen=True)
    class Watching(NoProposer):
        def init(self, params, prompt, capacity):
            seen.append(prompt.features)
            return ()

        def read(self, params, state, block):
            return state

        def observe(self, params, state, block):
            seen.append(block.features)
            return state

    dec = Decoder(NET, Watching(), RULES["match"](), (), toys.CAPACITY)
    arrays = toys.params("none")
    state = jax.eval_shape(lambda: toys.prefill(dec, arrays))
    jax.eval_shape(dec.step, arrays, state)
    assert seen == [None, None]


@dataclasses.dataclass(frozen=True)
class Reads(NoProposer):
    taps: tuple[int, ...] = ()


@pytest.mark.parametrize("taps", [(4,), (0, 7), (-1,), (1, -3)])
def test_taps_that_the_target_lacks_are_refused(taps):
    """The decoder refuses them and names the range; a negative tap would silently count from the
    end."""
    with pytest.raises(ValueError) as caught:
        Decoder(NET, Reads(taps=taps), RULES["match"](), (), toys.CAPACITY)
    assert str(taps) in str(caught.value) and "[0, 3]" in str(caught.value)
    for good in ((0,), (3, 1)):
        Decoder(NET, Reads(taps=good), RULES["match"](), (), toys.CAPACITY)


@pytest.mark.parametrize("name", ["function", "cached function"])
def test_a_model_without_taps_says_so(name):
    """A user's function has no layers to tap, in a decoder or by itself."""
    model, params = own_models.own(name)
    assert model.num_taps == 0
    with pytest.raises(ValueError, match=r"reads the target's layers \(0,\).*offers none"):
        Decoder(model, Reads(taps=(0,)), RULES["match"](), (), toys.CAPACITY)
    tokens = jnp.asarray(toys.PROMPTS)
    with pytest.raises(ValueError, match=r"taps=\(0,\), and this model offers no layer"):
        model.apply(params, tokens, places(tokens), taps=(0,))
