"""Taps: the layers of the target that a proposer reads, in prompts and in every committed block."""

import dataclasses
from typing import Any

import folders
import jax
import jax.numpy as jnp
import numpy as np
import own_models
import pytest
import torch
import toys
from flax import struct
from jax import Array

import specjax
from specjax import Decoder, NoProposer
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
def by_hand(tokens):
    """[B, T] -> [B, T, 3 E]: the residual streams, captured by Flax's own intermediates."""
    _, captured = NET.module.apply(
        {"params": toys.weights()},
        tokens,
        places(tokens),
        capture_intermediates=lambda module, name: isinstance(module, Layer) and name == "__call__",
        mutable=["intermediates"],
    )
    layers = [captured["intermediates"][f"layer_{i}"]["__call__"][0][0] for i in range(2)]
    return jnp.concatenate([toys.weights()["embedding"][tokens], *layers], axis=-1)


def test_features_are_the_residual_streams():
    """Tap 0 is the embedding, tap i the output of layer i, and the last one the hidden state after
    the final norm."""
    tokens = jnp.asarray(toys.greedy_texts()[:2])
    streams = np.split(np.asarray(by_hand(tokens)), 3, axis=-1)
    assert NET.num_taps == 4
    for taps in ((0,), (1,), (2, 0), (0, 1, 2)):
        out = NET.apply(toys.weights(), tokens, places(tokens), taps=taps)
        wanted = np.concatenate([streams[tap] for tap in taps], axis=-1)
        np.testing.assert_allclose(out.features, wanted, rtol=1e-5, atol=1e-5)
    config = NET.module.config
    normed = Norm(config).apply({"params": toys.weights()["norm"]}, streams[2])
    np.testing.assert_allclose(normed, out.hidden, rtol=1e-4, atol=1e-4)
    last = NET.apply(toys.weights(), tokens, places(tokens), taps=(3,))
    np.testing.assert_array_equal(last.features, last.hidden)


def test_features_are_those_of_transformers():
    """`output_hidden_states` uses the same numbers, except that its last entry is tap L + 1: it
    went through the final norm."""
    model = folders.random_llama(4)
    loaded = specjax.load(folders.write(model, "taps"))
    tokens = folders.random_tokens(60)
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens).long(), output_hidden_states=True).hidden_states
    layers = loaded.model.num_taps - 2
    assert len(wanted) == layers + 1 > 2
    taps = (*range(layers), layers + 1)
    out = loaded.model.apply(loaded.params, jnp.asarray(tokens), places(tokens), taps=taps)
    for our, their in zip(jnp.split(out.features, layers + 1, axis=-1), wanted, strict=True):
        assert their.std() > 0.01
        np.testing.assert_allclose(our, their.numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(out.hidden, wanted[-1].numpy(), rtol=0, atol=1e-4)


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
        rows, width = prompt.tokens.shape
        features = (
            jnp.zeros((rows, capacity + self.max_depth + 1, SIZE))
            .at[:, :width]
            .set(prompt.features)
        )
        return RecordedState(self.inner.init(params, prompt, capacity), features, prompt.count)

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


@pytest.mark.parametrize("chunk", [prefill.CHUNK, 3], ids=["one pass", "chunks"])
@pytest.mark.parametrize(
    ("case", "rule"), [("draft 3", "match"), ("tree", "rejection"), ("ngram", "match")]
)
def test_a_proposer_meets_the_features_of_all_that_is_committed(case, rule, chunk, monkeypatch):
    """Features arrive for chunked prompts and for every accepted path, and the text is
    unchanged."""
    monkeypatch.setattr(prefill, "CHUNK", chunk)
    proposer, arrays = toys.CASES[case][0], toys.params(case)
    # Each chunk needs another capacity: jit finds programs by decoder, which does not know the
    # chunk.
    dec = Decoder(
        NET, Recorder(proposer), toys.RULES[rule](), (toys.EOS,), toys.CAPACITY + chunk % 2
    )
    state = dec.run(arrays, toys.prefill(dec, arrays, temperature=1.0))
    assert toys.texts(state) == toys.decoded(case, rule, 1.0)[0]
    assert state.stats.accepted.sum() > 2
    plain = by_hand(jnp.asarray(state.tokens[:, : toys.CAPACITY]))
    wanted = np.concatenate([plain[..., 32 * tap :][..., :32] for tap in TAPS], axis=-1)
    np.testing.assert_array_equal(state.proposer.length, state.length - 1)
    for row, length in enumerate(np.asarray(state.proposer.length)):
        np.testing.assert_allclose(
            state.proposer.features[row, :length], wanted[row, :length], rtol=0, atol=1e-4
        )


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

        def observe(self, params, state, block):
            seen.append(block.features)
            return state

    dec = Decoder(NET, Watching(), toys.RULES["match"](), (), toys.CAPACITY)
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
        Decoder(NET, Reads(taps=taps), toys.RULES["match"](), (), toys.CAPACITY)
    assert str(taps) in str(caught.value) and "[0, 3]" in str(caught.value)
    for good in ((0,), (2, 1)):
        Decoder(NET, Reads(taps=good), toys.RULES["match"](), (), toys.CAPACITY)


@pytest.mark.parametrize("name", ["function", "cached function"])
def test_a_model_without_taps_says_so(name):
    """A user's function has no layers to tap, in a decoder or by itself."""
    model, params = own_models.own(name)
    assert model.num_taps == 0
    with pytest.raises(ValueError, match=r"reads the target's layers \(0,\).*offers none"):
        Decoder(model, Reads(taps=(0,)), toys.RULES["match"](), (), toys.CAPACITY)
    tokens = jnp.asarray(toys.PROMPTS)
    with pytest.raises(ValueError, match=r"taps=\(0,\), and this model offers no layer"):
        model.apply(params, tokens, places(tokens), taps=(0,))
