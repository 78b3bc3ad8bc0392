"""The configuration of the transformer: its sizes, and the switches in which families differ."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from specjax._internal.checks import chosen, flag, number, real, settle, shown, typed, whole, within
from specjax.models.rope import Rope
from specjax.models.router import Router

if TYPE_CHECKING:
    from flax import linen as nn
    from jax.typing import DTypeLike

    from specjax.caches import LayerState

BRANCHES = ("both", "mixer", "mlp")
"""The branches of a layer: a mixer and then a feed-forward part, or one of the two."""

NORM_ORDERS = ("pre", "post", "sandwich", "after", "parallel", "shared")
"""The orders of the norm and the two branches f of a layer (attention, then MLP):

pre       x + f(norm(x))
post      x + norm(f(x))
sandwich  x + norm(f(norm(x)))
after     norm(x + f(x))
parallel  x + attention(norm(x)) + mlp(norm(x)), each with a norm of its own
shared    x + attention(n) + mlp(n), where n = norm(x)
"""

MOST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "mlp_size": 2**24,
    "num_layers": 512,
    "num_heads": 2**14,
    "num_kv_heads": 2**14,
    "head_dim": 2**14,
    "max_positions": 2**31 - 2**16,
    "embedding_size": 2**20,
    "num_experts": 2**14,
    "experts_per_token": 2**14,
    "expert_size": 2**24,
    "expert_width": 2**20,
    "per_layer_size": 2**20,
    "shared_size": 2**24,
}
"""The greatest sizes.  They far exceed those of published models, and keep a damaged file from
making this library build a list for each of 10^7 experts before it reads the weights.
"""

_CHOICES = {
    "norm": ("rms", "layer", "centred"),
    "norm_order": NORM_ORDERS,
    "qk_norm": (None, "head", "heads", "whole", "unit"),
    "activation": ("silu", "relu", "relu2", "gelu", "gelu_tanh"),
}
_FLAGS = ("interleaved", "tied_embeddings", "head_bias", "final_norm", "qkv_bias", "out_bias",
          "output_gate", "qk_norm_last", "value_norm", "sinks", "chunked", "gated", "mlp_bias",
          "wide_sharing", "layer_scale", "normalise_experts", "expert_bias", "shared_gate",
          "experts_beside")  # fmt: skip
_NUMBERS = {
    **dict.fromkeys(("embedding_scale", "norm_eps", "init_scale", "gate_slope"), "[0, 3.4e38]"),
    **dict.fromkeys(("branch_scale", "logit_scale", "gate_scale", "down_scale"), "(0, 3.4e38]"),
    "norm_offset": "[-3.4e38, 3.4e38]",
}
"""Fields that are numbers which float32 holds, and the interval of each."""

_POSITIVE = ("logit_softcap", "query_scale", "attention_softcap", "gate_limit")  # or None


def _is_window(value: object) -> bool:
    plain = number(value)
    return value is None or (isinstance(plain, int) and 1 <= plain < 2**31)


@dataclasses.dataclass(frozen=True)
class Beside:
    """Attention that reads the same norm as a layer's mixer; the outputs of the two are added.

    It is attention as the configuration's fields say.
    """

    input_scale: float = 1.0
    key_scale: float = 1.0
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError with the field, its value and the allowed values."""
        for name, value in vars(self).items():
            real(name, value, "[-3.4e38, 3.4e38]")


@dataclasses.dataclass(frozen=True)
class Mixer(abc.ABC):
    """The sizes of a layer's mixer, where it is not attention as the configuration's fields say."""

    @abc.abstractmethod
    def module(self) -> type[nn.Module]:
        """Returns the module of this mixer, which is called as `mixers.attention.Attention`.

        Other mixers than attention are made of the configuration of the model, this record, and the
        `dense` of `Transformer`.
        """

    def slots(self) -> tuple[int, int, int] | None:
        """Returns the sizes that the layer's cache keeps for each token; None: it keeps a state.

        They are the number of key heads, the size of a key, and the size of a value.
        """
        return None

    def attention(self) -> Beside | None:
        """Returns the attention beside this mixer; None: there is none."""
        return None

    @abc.abstractmethod
    def state(self, batch: int, dtype: DTypeLike) -> LayerState:
        """Returns the state before the first token of `batch` rows, if `slots` is None."""

    def resized(self, hidden_size: int) -> Mixer:
        """Returns this mixer for a residual stream of another size; by default unchanged."""
        del hidden_size
        return self

    def units(self) -> int:
        """Returns the number of equal parts into which the axes named "states" may be split.

        0 means that it has no such axes.
        """
        return 0 if self.slots() is not None else 1

    def rotated(self) -> int | None:
        """Returns the size of the heads that a rope turns; None: the configuration's `head_dim`."""
        return None

    def kv_heads(self) -> int | None:
        """Returns the number of key heads that devices share out; None: that of attention."""
        return None

    def shares(self) -> bool:
        """Returns whether the layer reads the keys and values of an earlier layer.

        It is the last one before it with keys of its own, of the same sizes and the same window.
        """
        return False


_PER_LAYER = {
    "ropes": (lambda value: isinstance(value, Rope | None), "a Rope or None"),
    "windows": (_is_window, "a whole number of at least 1, or None"),
    "sparse": (lambda value: isinstance(value, bool), "True or False"),
    "norm_orders": (lambda value: value in NORM_ORDERS, " or ".join(map(repr, NORM_ORDERS))),
    "branches": (lambda value: value in BRANCHES, " or ".join(map(repr, BRANCHES))),
    "mixers": (lambda value: isinstance(value, Mixer | None), "a Mixer or None"),
}
"""Fields with an entry for each layer: whether a value is one, and the entries in words."""


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The configuration of a transformer: hashable, to be a static argument of `jax.jit`.

    A setting that differs between layers is a tuple with one entry for each layer; an empty tuple
    means that all layers are alike.
    """

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    # Positions
    rope: Rope | None = dataclasses.field(default_factory=Rope)
    ropes: tuple[Rope | None, ...] = ()  # by layer, instead of `rope`
    interleaved: bool = False  # a rope rotates dimensions 2i and 2i + 1, not i and i + R / 2
    # Learned positions: token t adds row offset + t of a table; None: no table.
    position_offset: int | None = None
    # Embedding and head
    embedding_size: int | None = None  # None: `hidden_size`; else embeddings are projected
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
    head_bias: bool = False  # of the output matrix
    logit_scale: float = 1.0  # of the final hidden state, and so of the logits
    logit_softcap: float | None = None  # c tanh(x / c)
    # Norms
    norm: str = "rms"  # or "layer", or "centred": a layer norm without bias
    norm_offset: float = 0.0  # the factor is offset + weight
    norm_eps: float = 1e-5
    norm_order: str = "pre"
    norm_orders: tuple[str, ...] = ()  # by layer, instead of `norm_order`
    branches: tuple[str, ...] = ()  # by layer, of `BRANCHES`; without it each layer has both
    branch_scale: float = 1.0  # of what attention and MLP add to the residual stream
    final_norm: bool = True
    # Attention
    qkv_bias: bool = False
    out_bias: bool = False
    output_gate: bool = False  # the output is multiplied by sigmoid(W x) before `o`
    # RMS norm of queries and keys: over each "head", or over the "whole" projection; or "heads": a
    # layer norm without bias over each head, with weights of its own; or "unit": an RMS norm over
    # each head without weights, in layers whose rope turns something.
    qk_norm: str | None = None
    qk_norm_last: bool = False  # after the rope
    query_scale: float | None = None  # by default head_dim ** -0.5
    value_norm: bool = False  # RMS norm of each head's values, without weights
    attention_softcap: float | None = None
    sinks: bool = False  # a learned score for each head joins the softmax, with a value of 0
    windows: tuple[int | None, ...] = ()  # by layer: tokens that a token attends to, with itself
    # A token attends to the tokens of its own chunk: those at positions from the last multiple of
    # the window on.
    chunked: bool = False
    # Layers with another mixer than this attention
    mixers: tuple[Mixer | None, ...] = ()  # by layer; None: attention
    # MLP
    activation: str = "silu"
    gated: bool = True
    mlp_bias: bool = False
    wide_sharing: bool = False  # MLPs of layers that share keys have twice `mlp_size`
    gate_scale: float = 1.0  # of the gate, before its activation function
    down_scale: float = 1.0  # of the output
    # Gate and up are clamped: (up + 1) * gate * sigmoid(gate_slope * gate).  None: act(gate) * up
    gate_limit: float | None = None
    gate_slope: float = 1.702
    # The end of a layer
    per_layer_size: int = 0  # of what `models.per_layer` adds; 0: it adds nothing
    layer_scale: bool = False  # the output of a layer is multiplied by a learned number
    # Mixture of experts
    num_experts: int = 0
    experts_per_token: int = 2
    expert_size: int = 0
    expert_width: int = 0  # of what experts read and write; 0: that of the stream
    normalise_experts: bool = True  # the chosen experts' weights sum to 1
    router: Router = dataclasses.field(default_factory=Router)
    expert_bias: bool = False  # of gate, up and down
    shared_size: int = 0  # of an MLP that all tokens of a sparse layer read; 0: there is none
    shared_gate: bool = False  # its output is multiplied by a sigmoid of the token
    # A sparse layer has an MLP, too: the norms of the two outputs are added ("sandwich" only).
    experts_beside: bool = False
    sparse: tuple[bool, ...] = ()  # by layer: whether it has experts
    # States are updated token by token, in one order of operations whatever a pass reads.
    exact_states: bool = False
    init_scale: float = 0.02
    family: str = "llama"  # a row of models.FAMILIES

    def __post_init__(self) -> None:
        """Raises ValueError with the field, its value and the allowed values."""
        self._check_sizes()
        self._check_kinds()
        layers, heads = self.num_layers, self.num_kv_heads
        counts = {name: len(getattr(self, name)) for name in _PER_LAYER}
        settle(
            (
                self.num_heads % heads,
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={heads}: "
                "grouped-query attention shares each key head among the same number of query heads",
            ),
            (
                self.head_bias and self.tied_embeddings,
                "head_bias=True and tied_embeddings=True; only an output matrix of its own has one",
            ),
            (
                self.expert_bias and not self.gated,
                "expert_bias=True and gated=False; only experts with a gate have biases",
            ),
            (
                self.experts_beside and self.norm_order != "sandwich",
                f"experts_beside=True and norm_order={self.norm_order!r}; only layers with "
                "norm_order='sandwich' have experts beside an MLP",
            ),
            *(
                (
                    sizes is not None and self.num_heads % sizes[0],
                    f"num_heads={self.num_heads} is not a multiple of the {sizes and sizes[0]} key "
                    "heads of a layer in mixers",
                )
                for sizes in map(self.slots_of, range(len(self.mixers)))
            ),
            *(
                (entries not in (0, layers), f"{name} has {entries} entries for {layers} layers")
                for name, entries in counts.items()
            ),
        )
        alone = [i for i in range(layers) if self.branch_of(i) != "both"]
        settle(
            (
                any(self.norm_order_of(i) not in ("pre", "post", "sandwich") for i in alone),
                "a layer with one branch has norms before or after it: its norm order must be "
                "'pre', 'post' or 'sandwich'",
            ),
        )
        for rope, size in {(self.rope_of(i), self.rotated_of(i)) for i in range(layers)}:
            if rope is None:
                continue
            turned = rope.turned(size)
            settle(
                (
                    turned % 2,
                    f"head_dim={size} gives an odd number of rotated dimensions; rotary "
                    "embeddings rotate pairs",
                ),
                (
                    rope.kind == "longrope" and len(rope.factors) != turned // 2,
                    f"a longrope has {len(rope.factors)} factors; {turned} rotated dimensions need "
                    f"{turned // 2}, one for each pair",
                ),
            )
        for layer in range(layers):
            self.owner_of(layer)
        if self.num_experts:
            within("experts_per_token", self.experts_per_token, 1, self.num_experts)
            self.router.check(self.num_experts, self.experts_per_token)

    def _check_sizes(self) -> None:
        for name, most in MOST.items():
            value, least = getattr(self, name), 1
            if name in ("per_layer_size", "shared_size", "expert_width") or (
                name in ("num_experts", "expert_size") and not self.num_experts
            ):
                least = 0
            if name != "embedding_size" or value is not None:
                whole(name, value, least, most, f"a whole number in [{least}, {most}]")
        if self.position_offset is not None:
            wanted = "None, or a whole number in [0, 65536]"
            whole("position_offset", self.position_offset, 0, 2**16, wanted)

    def _check_kinds(self) -> None:
        for name, allowed in _CHOICES.items():
            chosen(name, getattr(self, name), allowed)
        for name in _FLAGS:
            flag(name, getattr(self, name))
        for name, interval in _NUMBERS.items():
            real(name, getattr(self, name), interval)
        for name in _POSITIVE:
            if getattr(self, name) is not None:
                real(name, getattr(self, name), "(0, 3.4e38]", ", or be None")
        for name in _PER_LAYER:
            typed("a tuple with one entry for each layer", tuple, **{name: getattr(self, name)})
        settle(
            *(
                (not all(map(entry, getattr(self, name))),
                 f"{name}={shown(getattr(self, name))}; each entry must be {wanted}")
                for name, (entry, wanted) in _PER_LAYER.items()
            ),
        )  # fmt: skip
        typed("a Rope, or None for no rope", Rope | None, rope=self.rope)
        typed("a Router", Router, router=self.router)
        typed("a name, such as 'llama'", str, family=self.family)

    def keep(self, layers: Sequence[int]) -> TransformerConfig:
        """Returns the configuration of only these layers, in this order."""
        own = {
            name: tuple(entries[i] for i in layers) if (entries := getattr(self, name)) else ()
            for name in _PER_LAYER
        }
        for name in ("windows", "mixers"):  # alike, as a family reads them
            own[name] = own[name] if any(own[name]) else ()
        if all(own["sparse"]):
            own["sparse"] = ()
        return dataclasses.replace(self, num_layers=len(layers), **own)

    def truncated(self, num_layers: int) -> TransformerConfig:
        """Returns the configuration of only the first `num_layers` layers."""
        return self.keep(range(num_layers))

    @property
    def least_tensors(self) -> int:
        """Returns a lower bound of the tensors: one a layer, and two or three an expert."""
        sparse = sum(self.is_sparse(i) for i in range(self.num_layers))
        return self.num_layers + (3 if self.gated else 2) * sparse * self.num_experts

    def rope_of(self, layer: int) -> Rope | None:
        """Returns the rotary embedding of a layer, counted from 0; None if the layer has none."""
        return self.ropes[layer] if self.ropes else self.rope

    def window_of(self, layer: int) -> int | None:
        """Returns the number of tokens that a layer attends to, itself included; None if to all."""
        return self.windows[layer] if self.windows else None

    def mixer_of(self, layer: int) -> Mixer | None:
        """Returns the mixer of a layer, counted from 0; None if it is attention."""
        return self.mixers[layer] if self.mixers else None

    def norm_order_of(self, layer: int) -> str:
        """Returns the order of the norms and branches of a layer, counted from 0."""
        return self.norm_orders[layer] if self.norm_orders else self.norm_order

    def branch_of(self, layer: int) -> str:
        """Returns which of `BRANCHES` a layer has."""
        return self.branches[layer] if self.branches else "both"

    def attends(self, layer: int) -> bool:
        """Returns whether a layer has attention as the fields of this configuration say."""
        if self.branch_of(layer) == "mlp":
            return False
        mixer = self.mixer_of(layer)
        return mixer is None or mixer.attention() is not None

    def beside(self, layer: int) -> bool:
        """Returns whether a layer has this attention beside a mixer with a state."""
        return self.attends(layer) and self.mixer_of(layer) is not None

    def slots_of(self, layer: int) -> tuple[int, int, int] | None:
        """Returns what `Mixer.slots` does; for attention the sizes of this configuration."""
        if self.attends(layer):
            return self.num_kv_heads, self.head_dim, self.head_dim
        mixer = self.mixer_of(layer)
        return None if mixer is None else mixer.slots()

    def has_state(self, layer: int) -> bool:
        """Returns whether the cache of a layer is a state, or has one beside its slots."""
        mixer = self.mixer_of(layer)
        if mixer is not None and mixer.slots() is None:
            return True
        return self.branch_of(layer) == "mlp"

    def owner_of(self, layer: int) -> int:
        """Returns the layer whose keys and values, or state, a layer reads: itself by default.

        Raises ValueError if it reads those of an earlier layer (`Mixer.shares`), and there is none.
        """
        mixer = self.mixer_of(layer)
        if mixer is None or not mixer.shares():
            return layer
        for other in reversed(range(layer)):
            earlier = self.mixer_of(other)
            own = earlier is None or not earlier.shares()
            alike = self.slots_of(other) == mixer.slots()
            if own and alike and self.window_of(other) == self.window_of(layer):
                return other
        raise ValueError(
            f"layer {layer} of {self.num_layers} reads keys and values of an earlier layer, and "
            "none has keys of its own with the same sizes and window: keep that layer too"
        )

    @property
    def owners(self) -> tuple[int, ...]:
        """Returns the layers with keys and values, or a state, of their own: a cache leaf each."""
        return tuple(i for i in range(self.num_layers) if self.owner_of(i) == i)

    @property
    def common_kv_heads(self) -> int:
        """Returns the greatest number of parts into which every layer's key heads can be split."""
        return math.gcd(self.num_kv_heads, *(m.kv_heads() or 0 for m in self.mixers if m))

    def mlp_size_of(self, layer: int) -> int:
        """Returns the size of a layer's MLP."""
        wide = self.wide_sharing and self.owner_of(layer) != layer
        return 2 * self.mlp_size if wide else self.mlp_size

    def rotated_of(self, layer: int) -> int:
        """Returns the size of the heads that the rope of a layer turns."""
        mixer = self.mixer_of(layer)
        return self.head_dim if mixer is None else mixer.rotated() or self.head_dim

    def kind_of(self, layer: int) -> tuple[Hashable, ...]:
        """Returns what a layer computes beside its parameters, rope and cache: equal layers have
        equal programs."""
        return (
            self.mixer_of(layer),
            self.window_of(layer),
            self.norm_order_of(layer),
            self.branch_of(layer),
            self.mlp_size_of(layer),
            self.is_sparse(layer),
        )

    def is_sparse(self, layer: int) -> bool:
        """Returns whether a layer has experts."""
        return self.num_experts > 0 and (not self.sparse or self.sparse[layer])
