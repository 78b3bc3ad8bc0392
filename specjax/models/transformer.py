"""The decoder-only transformer that all families share.

A family is a configuration of it and a table of tensor names.  Layers are unrolled, each with its
own cache leaf: a scan over stacked layers would slice every weight and cache leaf in each
iteration.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.core import Tracer
from jax.typing import DTypeLike

from specjax import kernels
from specjax._internal.platforms import platform_of_shapes
from specjax.caches import (
    Both,
    ChoosingCache,
    HybridCache,
    KVCache,
    LayerState,
    Memory,
    PagedCache,
    Staged,
    WindowedCache,
    Written,
)
from specjax.models import feed_forward
from specjax.models.attention import attend, cpu_attend, gpu_attend
from specjax.models.config import TransformerConfig
from specjax.models.layers import Dense, Norm, Pending, look_up, named_param, on_target, scaled
from specjax.models.mixers import Attention, AttentionSizes, Rotations
from specjax.models.packed import is_packed
from specjax.models.products import dot_general, gpu_dot_general
from specjax.models.whole_layers import form_of_layers, run_whole_layers, together_or_apart
from specjax.types import ModelOutput

if TYPE_CHECKING:
    from specjax.models.per_layer import Embedded

_Slots = Memory | tuple[Array, Array] | None
_Memory = _Slots | LayerState | Both  # the cache of one layer, or what its owner has of it
_ONE_ROW = KVCache, PagedCache, ChoosingCache
"""The caches to whose one row a GPU may stage a token twice."""
_CAUSAL = (KVCache, None, False), (ChoosingCache, None, False)
"""Kinds of layers, for which a GPU needs no mask: a cache, no window, and no state beside it."""
_Visible = Array | tuple[Array | None, Array | None] | None


class Layer(nn.Module):
    """A mixer, then a feed-forward part, each added to the residual stream; or one of the two.

    The configuration says where the norms are.
    """

    config: TransformerConfig
    index: int
    dense: Callable[..., Dense]
    attend: Callable[..., Array] = attend
    pends: bool = False

    @nn.compact
    def __call__(
        self,
        x: Array | Pending,
        rotations: Rotations,
        memory: _Memory,
        visible: _Visible,
        embedded: Embedded | None = None,
    ) -> tuple[Array | Pending, Written]:
        """Returns the stream [B, N, E] after the layer, and the layer's cache; as its mixer does.

        Args:
          x: [B, N, E].  If the layer `pends`, the stream that it returns is a `Pending`, and so may
            be x: the next norm does the addition.
          rotations, memory: as for `models.mixers.attention.Attention`.
          visible: as there.  For a mixer with a state it is [B or 1, N, N] and has the ancestors of
            each token among the N, itself included.  For a mixer beside attention it is a pair:
            that of attention, and the ancestors.
          embedded: of the tokens, if the layer has a table of its own.
        """
        if self.pends:
            return self._pending(x, rotations, cast(_Slots, memory), cast(Array | None, visible))
        assert not isinstance(x, Pending)
        x, written = self._branches(x, rotations, memory, visible)
        if embedded is not None:
            from specjax.models.per_layer import PerLayerInput

            x = PerLayerInput(self.config, self.dense, name="per_layer")(x, embedded)
        if self.config.layer_scale:
            ones = nn.initializers.ones_init()
            x = x * named_param(self, "scale", ones, ("one",), (1,)).astype(x.dtype)
        return x, written

    def _branches(
        self, x: Array, rotations: Rotations, memory: _Memory, visible: _Visible
    ) -> tuple[Array, Written]:
        """Adds the branches of the layer to the stream."""
        c, order = self.config, self.config.norm_order_of(self.index)

        def norm(name: str, y: Array) -> Array:
            return Norm(c, name=name)(y)

        def branch(y: Array) -> Array:
            return scaled(y, c.branch_scale)

        before = order not in ("post", "after")
        after = order in ("post", "sandwich")
        alone = c.branch_of(self.index)
        if alone == "mlp":
            normed, mixed = x, None
            state = LayerState(()) if memory is None else cast(LayerState, memory)
            written = state.stage(Staged(()))
        else:
            normed = norm("attention_norm", x) if before else x
            mixed, written = self._mix(normed, rotations, memory, visible)
        if mixed is not None and order not in ("parallel", "shared"):
            x = x + branch(norm("attention_post_norm", mixed) if after else mixed)
            x = norm("attention_post_norm", x) if order == "after" else x
        if alone == "mixer":
            return x, written
        sparse = c.is_sparse(self.index)
        if sparse and not c.experts_beside:
            mlp = self._experts("mlp")
        else:
            mlp = feed_forward.MLP(c, self.dense, c.mlp_size_of(self.index), name="mlp")
        if mixed is not None and order in ("parallel", "shared"):
            read = normed if order == "shared" else norm("mlp_norm", x)
            return x + branch(mixed) + branch(mlp(read)), written
        added = mlp(norm("mlp_norm", x) if before else x)
        if sparse and c.experts_beside:
            experts = self._experts("experts")
            chosen = norm("experts_post_norm", experts(norm("experts_norm", x), x))
            added = norm("mlp_own_norm", added) + chosen
        x = x + branch(norm("mlp_post_norm", added) if after else added)
        return norm("mlp_post_norm", x) if order == "after" else x, written

    def _pending(
        self, x: Array | Pending, rotations: Rotations, slots: _Slots, visible: Array | None
    ) -> tuple[Pending, Written]:
        """Computes the layer, with products in parts that a norm adds to the stream."""
        c, norm = self.config, Norm(self.config, name="attention_norm")
        stream, normed = norm(x) if isinstance(x, Pending) else (x, norm(x))
        attention = Attention(
            c, c.window_of(self.index), self.dense, self.attend, in_parts=True, name="attention"
        )
        mixed, written = attention(normed, rotations, slots, visible)
        between, normed = Norm(c, name="mlp_norm")(Pending(stream, mixed))
        size = c.mlp_size_of(self.index)
        mlp = feed_forward.MLP(c, self.dense, size, in_parts=True, name="mlp")
        return Pending(between, mlp(normed), stream), written

    def _experts(self, name: str) -> feed_forward.Experts:
        if self.attend is cpu_attend:
            mix = feed_forward.in_tiles
        else:
            mix = feed_forward.by_kernel if self.attend is gpu_attend else feed_forward.grouped
        return feed_forward.Experts(self.config, self.dense, mix, name=name)

    def _mix(
        self, x: Array, rotations: Rotations, memory: _Memory, visible: _Visible
    ) -> tuple[Array, Written]:
        c, mixer = self.config, self.config.mixer_of(self.index)

        attention = functools.partial(
            Attention, c, c.window_of(self.index), self.dense, self.attend, name="attention"
        )
        if mixer is None or isinstance(mixer, AttentionSizes):
            slots = cast(_Slots, memory)
            return attention(sizes=mixer)(x, rotations, slots, cast(Array | None, visible))
        beside, other = mixer.attention(), mixer.module()(c, mixer, self.dense, name="mixer")
        if beside is None:
            return other(x, rotations, memory, visible)
        slots, state = (None, None) if memory is None else cast(Both, memory)
        seen, ancestors = cast(tuple[Array | None, Array | None], visible)
        mixed, state = other(x, rotations, state, ancestors)
        attended, pair = attention(key_scale=beside.key_scale)(
            scaled(x, beside.input_scale), rotations, cast(Memory | None, slots), seen
        )
        return mixed + scaled(attended, beside.output_scale), Both(pair, state)


class Transformer(nn.Module):
    """The decoder-only transformer: from tokens to logits and hidden states.

    `models.base.LinenModel` makes it a `contract.Model`.

    Attributes:
      config: sizes and switches.
      dot_general: multiplies with weights, like `models.products.dot_general`: training passes one
        that multiplies in bfloat16, and `load` one with kernels of our own for a CPU.
        Experts multiply as `models.feed_forward.by_expert` says.
      attend: attends to the slots of a cache, like `models.attention.attend`; `load` passes one
        with a kernel of our own for a CPU.
      separate_head: keep a second copy of a tied embedding as the output matrix, in the layout of
        the other kernels.
      transposed: hold kernels as [out, in].  On XLA:CPU several rows of float32 are up to 2.6 times
        faster with [in, out], and of bfloat16 up to 1.8 times faster with [out, in]; accelerators
        show no difference.
      remat: recompute the activations inside a layer in the backward pass instead of keeping them.
      head_tokens: the columns of an output matrix that has a part of the vocabulary; `columns` [V]
        has that of each token, or -1, and the logits of the other tokens are -inf.  None: it has
        all tokens.
      once: have only the first layer of each kind, for `shapes_of`.
    """

    config: TransformerConfig
    dot_general: Callable[..., Array] = dot_general
    separate_head: bool = False
    transposed: bool = False
    remat: bool = False
    attend: Callable[..., Array] = attend
    head_tokens: int | None = None
    once: bool = False

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    @property
    def num_taps(self) -> int:
        return self.config.num_layers + 2

    @property
    def sparse(self) -> bool:
        """Whether a layer has experts, of which a token uses a few."""
        return any(map(self.config.is_sparse, range(self.config.num_layers)))

    @property
    def one_cpu(self) -> bool:
        """Whether the model is on one CPU, for which kernels of our own are compiled."""
        return self.attend is cpu_attend

    @property
    def triton(self) -> bool:
        """Whether the model is on one GPU for which kernels of our own are compiled."""
        return self.attend is gpu_attend

    def init_cache(self, batch: int, size: int, dtype: DTypeLike) -> KVCache | HybridCache:
        """Returns an empty cache of `size` slots a row; layers with a window may have rings."""
        c = self.config
        every = c.owners
        slots = {i: c.slots_of(i) for i in every}
        windows = tuple(c.window_of(i) for i in every if slots[i]) if c.windows else ()
        form = WindowedCache if windows else KVCache
        cache = form.of([sizes for sizes in slots.values() if sizes], batch, size, dtype)
        # The kernel reads the caches of attention, and not of latent attention.
        sized = {i for i in every if isinstance(c.mixer_of(i), AttentionSizes)}
        plain = not c.sinks and all(c.attends(i) or i in sized for i in every if slots[i])
        by_kernel = plain and self.attend is cpu_attend
        cache = dataclasses.replace(cache, by_kernel=by_kernel, may_have_pages=True)
        if windows:
            cache = dataclasses.replace(cache, windows=windows)
        recurrent = tuple(c.has_state(i) for i in every)
        if not any(recurrent):
            return cache
        mixers = (c.mixer_of(i) for i in every if c.has_state(i))
        states = (LayerState(()) if m is None else m.state(batch, dtype) for m in mixers)
        return HybridCache(cache, tuple(states), recurrent, tuple(map(bool, slots.values())))

    @nn.compact
    def __call__(
        self,
        tokens: Array,
        positions: Array,
        cache: KVCache | HybridCache | None = None,
        mask: Array | None = None,
        taps: tuple[int, ...] = (),
    ) -> ModelOutput:
        """Runs one pass, with the shapes of `contract.Model.apply`.

        With L layers, tap L is the output of the last layer, and tap L + 1 that output after the
        final norm.
        """
        c = self.config
        size = c.embedding_size or c.hidden_size
        # XLA:GPU fuses more of two tokens than of one.  The second one lies in the spare slot.
        twice = tokens.size == 1 and type(cache) in _ONE_ROW and not self.sparse
        twice = twice and platform_of_shapes() == "gpu"
        if twice:
            tokens, positions = (jnp.repeat(x, 2, axis=1) for x in (tokens, positions))
            mask = None

        def table(name: str, rows: int, features: int, axes: tuple[str, str]) -> Array:
            init = nn.initializers.normal(c.init_scale)
            return named_param(self, name, init, axes, (rows, features))

        dense = functools.partial(Dense, dot_general=self.dot_general, transposed=self.transposed)

        def linear(name: str, features: int, axes: tuple[str, str]) -> Dense:
            return dense(features, axes, False, c.init_scale, name=name)

        embedding = table("embedding", c.vocab_size, size, ("vocab", "embed"))
        x = look_up(embedding, tokens)
        if c.embedding_scale != 1.0:
            x = x * jnp.asarray(c.embedding_scale, x.dtype)
        if c.embedding_size is not None:
            x = linear("project_in", c.hidden_size, ("embed_in", "embed"))(x)
        if c.position_offset is not None:
            rows = c.max_positions + c.position_offset
            learned = table("positions", rows, c.hidden_size, ("positions", "embed"))
            x = x + look_up(learned, positions + c.position_offset)
        embedded = None
        if c.per_layer_size:
            ones = nn.initializers.ones_init()
            weights = named_param(self, "per_layer_norm", ones, ("norm",), (c.per_layer_size,))
            from specjax.models.per_layer import Embedded

            embedded = Embedded(tokens, x, weights)

        block = nn.remat(Layer) if self.remat else Layer
        pends = cache is not None and self._pends(tokens)
        each = sorted(set(first_of_kinds(c))) if self.once else range(c.num_layers)
        layers = [block(c, i, dense, self.attend, pends, name=f"layer_{i}") for i in each]
        watched = self.is_initializing() or self.is_mutable_collection("intermediates")
        alone = self.remat or watched
        held = None if alone else [self.variables["params"][f"layer_{i}"] for i in each]

        def one_by_one(
            held: Sequence[Mapping[str, Any]] | None,
            x: Array,
            positions: Array,
            cache: Any,
            mask: Array | None,
        ) -> tuple[list[Array], KVCache | HybridCache | None]:
            called: Sequence[Callable[..., tuple[Any, Written]]] = layers
            if held is not None and isinstance(x, Tracer):
                called = traced_by_kind(c, layers, held)
            return run_layers(
                c.keep(each) if self.once else c, called, x, positions, cache, mask, embedded,
                self.triton and not watched,
            )  # fmt: skip

        inputs = held, x, positions, cache, mask
        form = None
        if held is not None:
            form = form_of_layers(c, self.dot_general, self.attend, held, x, cache)
        if form is None:
            streams, cache = one_by_one(*inputs)
        else:

            def together(
                held: Sequence[Mapping[str, Any]],
                x: Array,
                positions: Array,
                cache: KVCache,
                mask: Array | None,
            ) -> tuple[list[Array], KVCache]:
                if x.shape[1] <= kernels.MOST_TOKENS or len(held) == 1:
                    return run_whole_layers(form, c, held, x, positions, cache, mask)
                # Mostly a prompt is read for its keys and values.  XLA leaves out the second call
                # where nobody reads the last layer's output, and computes only its keys and values.
                last = len(held) - 1
                streams, before = run_whole_layers(
                    form, c, held[:last], x, positions, cache.first(last), mask
                )
                called = traced_by_kind(c, layers, held)[last:]
                inputs = streams[-1], positions, cache.layer(last), mask
                after = run_layers(c.keep([last]), called, *inputs)[1]
                ends = run_whole_layers(form, c, held[last:], *inputs)[0]
                assert isinstance(after, KVCache)
                keys, values = before.keys + after.keys, before.values + after.values
                cache = dataclasses.replace(cache, keys=keys, values=values)
                return [*streams, *ends[1:]], cache

            streams, cache = together_or_apart(together, one_by_one, *inputs)
        x = streams[-1]
        if pends:
            streams[-1], hidden = Norm(c, name="norm")(x)
        else:
            hidden = Norm(c, name="norm")(x) if c.final_norm else x
        streams.append(hidden)
        if c.embedding_size is not None:
            hidden = linear("project_out", size, ("embed", "embed_in"))(hidden)
        if c.logit_scale != 1.0:
            # So all who multiply hidden states by `head_matrix` have the logits.
            hidden = hidden * jnp.asarray(c.logit_scale, hidden.dtype)
        if c.tied_embeddings and not self.separate_head:
            logits = self.dot_general(hidden, embedding, (((hidden.ndim - 1,), (1,)), ((), ())))
        else:
            axes = ("embed", "vocab")
            units = self.head_tokens or c.vocab_size
            head = dense(units, axes, c.head_bias, c.init_scale, name="head")
            logits = head(hidden)
        if c.logit_softcap is not None:
            logits = c.logit_softcap * jnp.tanh(logits.astype(jnp.float32) / c.logit_softcap)
        if self.head_tokens is not None:
            zeros = nn.initializers.zeros_init()
            columns = named_param(self, "columns", zeros, ("tokens",), (c.vocab_size,))
            logits = on_target(logits, c.vocab_size, columns.astype(jnp.int32))
        features = jnp.concatenate([streams[tap] for tap in taps], axis=-1) if taps else None
        if twice:
            logits, hidden, features = jax.tree.map(lambda x: x[:, :1], (logits, hidden, features))
        return ModelOutput(logits, hidden, cache, features)

    def _pends(self, tokens: Array) -> bool:
        """Returns whether the layers leave their additions to norms, by a kernel for a GPU."""
        c = self.config
        each = range(c.num_layers)
        plain = all(
            c.norm_order_of(i) == "pre"
            and c.branch_of(i) == "both"
            and c.mixer_of(i) is None
            and not c.is_sparse(i)
            for i in each
        )
        return (
            self.triton
            and self.dot_general in (dot_general, gpu_dot_general)
            and not self.is_initializing()
            and tokens.size <= kernels.MOST_NORMED_ROWS
            and plain
            and c.norm == "rms"
            and c.final_norm
            and c.branch_scale == c.down_scale == 1.0
            and not (c.out_bias or c.mlp_bias or c.layer_scale or c.per_layer_size)
            and not any(map(_is_int8, jax.tree.leaves(self.variables, is_leaf=_is_boxed)))
        )


def _is_boxed(leaf: object) -> bool:
    """Returns whether a parameter is rounded or packed, and no array."""
    return isinstance(leaf, nn.meta.AxisMetadata)


def _is_int8(leaf: object) -> bool:
    """Returns whether a parameter is rounded, as `quantise` does it."""
    return _is_boxed(leaf) and not is_packed(leaf)


def traced_by_kind(
    c: TransformerConfig, layers: Sequence[Layer], params: Sequence[Mapping[str, Any]]
) -> list[Callable[..., tuple[Array, Written]]]:
    """Layers as functions, of which those of one kind share a trace and its lowering.

    XLA inlines them, so what it compiles is the same; tracing 28 layers takes a few times as long
    as tracing one.  A pass has functions of its own, so nothing of a trace outlives it.

    Args:
      c: the configuration of the layers.
      layers: of a module.
      params: of each layer.
    """
    firsts = first_of_kinds(c)

    def function(layer: Layer) -> Callable[..., tuple[Array, Written]]:
        alone = layer.clone(parent=None)
        return jax.jit(lambda own, *given: alone.apply({"params": own}, *given))

    functions = {i: function(layers[i]) for i in set(firsts)}
    return [
        functools.partial(functions[first], own) for first, own in zip(firsts, params, strict=True)
    ]


def first_of_kinds(c: TransformerConfig) -> list[int]:
    """Returns for each layer the first one of its kind."""
    kinds = [c.kind_of(i) for i in range(c.num_layers)]
    return list(map(kinds.index, kinds))


def shapes_of(module: nn.Module) -> Any:
    """Returns the shapes of a module's parameters, with their names of axes, as `init` makes them.

    Of a transformer only the first layer of each kind is traced: tracing all layers takes as long
    as much of a first call.
    """
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)

    def traced(module: nn.Module) -> Any:
        def init(tokens: Array) -> Any:  # with a key that compiles nothing
            return module.init(jax.random.key(0), tokens, tokens)["params"]

        return jax.eval_shape(init, tokens)

    if not isinstance(module, Transformer):
        return traced(module)
    c = module.config
    if any(c.owner_of(i) != i for i in range(c.num_layers)):
        return traced(module)  # a layer reads keys of one that may be left out
    made = traced(module.clone(once=True))
    layers = {f"layer_{i}": made[f"layer_{first}"] for i, first in enumerate(first_of_kinds(c))}
    return {**made, **layers}


def run_layers(
    c: TransformerConfig,
    layers: Sequence[Callable[..., tuple[Any, Written]]],
    x: Array,
    positions: Array,
    cache: KVCache | HybridCache | None,
    mask: Array | None,
    embedded: Embedded | None = None,
    causal: bool = False,
) -> tuple[list[Array], KVCache | HybridCache | None]:
    """Runs the layers of a network.

    Args:
      c: their configuration.
      layers: a `Layer` for each.
      x: [B, N, E], the residual stream before the first layer.
      positions, cache, mask: as in `contract.Model.apply`.
      embedded: as for `Layer`.
      causal: give attention no mask where it follows from the cache, since it computes its own.

    Returns:
      The stream before the first layer and after each, and the cache with the tokens staged.
    """
    # Layers of one kind share their rotations and masks.
    ropes = {(c.rope_of(i), c.rotated_of(i)) for i in range(c.num_layers)}
    rotations = {
        (rope, size): None if rope is None else rope.rotations(positions, size)
        for rope, size in ropes
    }
    leaves = {layer: leaf for leaf, layer in enumerate(c.owners)}
    owners = [c.owner_of(i) for i in range(c.num_layers)]
    memories = [None if cache is None else cache.layer(leaves[owner]) for owner in owners]
    kinds = [(type(m), c.window_of(i), c.beside(i)) for i, m in enumerate(memories)]
    visible = {
        kind: None
        if causal and mask is None and kind in _CAUSAL
        else _visible(kind[1], c.chunked, positions, memory, mask, kind[2])
        for kind, memory in dict(zip(kinds, memories, strict=True)).items()
    }
    written: dict[int, Any] = {}
    streams: list[Any] = [x]
    for i, layer in enumerate(layers):
        turned = rotations[c.rope_of(i), c.rotated_of(i)]
        memory = memories[i] if owners[i] == i else written[owners[i]]
        x, part = layer(x, turned, memory, visible[kinds[i]], embedded)
        if isinstance(x, Pending):
            streams[-1] = x.before
            x = dataclasses.replace(x, before=None)
        streams.append(x)
        if owners[i] == i:
            written[i] = part
    return streams, None if cache is None else cache.with_layers(list(written.values()))


def _visible(
    window: int | None,
    chunked: bool,
    positions: Array,
    memory: _Memory,
    mask: Array | None,
    both: bool = False,
) -> _Visible:
    """Returns [B, N, S] bool: the slots (without a cache: tokens) that each token attends to.

    None means plain causal attention.  A layer with a state has no slots, and reads `mask`.  A
    layer with both gets a pair of the two.
    """
    if both:
        slots = None if memory is None else cast(Both, memory).slots
        seen = _visible(window, chunked, positions, cast(Memory | None, slots), mask)
        return cast(Array | None, seen), mask
    if isinstance(memory, LayerState):
        return mask
    if memory is not None:
        return cast(KVCache, memory).visible(positions, mask, window, chunked)
    if chunked and window is not None:
        same = positions[:, :, None] // window == positions[:, None] // window
        return jnp.tril(same) if mask is None else mask & same
    if mask is None or window is None:
        return mask
    return mask & (positions[:, :, None] - positions[:, None] < window)


class Head(TypedDict):
    """The parameters of an output matrix: `kernel`, or its transpose `weight`."""

    kernel: NotRequired[Array]  # [E, V]
    weight: Array  # [V, E]
    bias: NotRequired[Array]  # [V]


class Tables(TypedDict, total=False):
    """The parameters of a network that belong to its vocabulary."""

    embedding: Array  # [V, E]
    head: Head  # where it is not the embedding


def head_matrix(params: Tables | dict[str, Any]) -> Array:
    """Returns the output matrix [E, V] that maps hidden states to logits.

    Raises ValueError if they need a bias, too.
    """
    if "head" not in params:
        assert "embedding" in params
        return params["embedding"].T
    head = params["head"]
    if "bias" in head:
        raise ValueError(
            "the output matrix of this model has a bias (lm_head_bias). Training, and drafters "
            "that share the matrix, would leave it out: draft with a draft model or prompt lookup"
        )
    return head["kernel"] if "kernel" in head else head["weight"].T
