"""Sampling settings as numbers per row, the warp of logits, and the noise that draws a token.

A token is drawn as argmax(warp(logits) + Gumbel noise), which is an exact sample of
softmax(warp(logits)).  Greedy decoding is temperature 0 on the same code path: `warp` then keeps a
single token, so the noise has no effect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax import kernels
from specjax._internal.checks import is_count, per_row, typed
from specjax._internal.platforms import on_cpu, on_cuda, on_gpu, on_tpu, platform_of_shapes

_PROPOSE, _ACCEPT, _RESIDUAL = 0, 1, 2

_IMPLEMENTATION = "threefry2x32"

_EXCLUDED = -30.0  # the score of a token that processors exclude, below those that are kept
_FEW = 16  # the most siblings or levels for which one pass over the vocabulary each pays
_BITS = 4  # the bits of a threshold that a GPU finds in one pass
_PARTS = 16  # in which it adds over a vocabulary
_BLOCKS = (128, 64, 32)  # sizes of the blocks in which a CPU looks for a maximum

_LEAST_TEMPERATURE = 1e-20
"""The least temperature that divides logits: logits up to 3e18 stay finite.  The noise only decides
between logits that are equal, or within 1e-18 of each other.
"""

_Numbers = float | Sequence[float] | np.ndarray | Array
_Host = Array | np.ndarray


@struct.dataclass
class Sampling:
    """Sampling settings, one number per row: new values never recompile, and rows may differ."""

    temperature: _Host  # [B] float32; 0 is greedy; values between 0 and 1e-20 count as 1e-20
    top_k: _Host  # [B] int32; 0 keeps all
    top_p: _Host  # [B] float32; 1 keeps all, and the best token is always kept
    min_p: _Host  # [B] float32; 0 keeps all

    @classmethod
    def create(
        cls,
        batch: int,
        temperature: _Numbers = 1.0,
        top_k: _Numbers = 0,
        top_p: _Numbers = 1.0,
        min_p: _Numbers = 0.0,
    ) -> Sampling:
        """Makes settings for `batch` rows, each a number for all rows or a sequence of one per row.

        Raises:
          ValueError: a value outside its range.

        Example:
          >>> Sampling.create(2, temperature=[0.0, 0.8], top_p=0.95).temperature
          Array([0. , 0.8], dtype=float32)
        """
        made = cls.on_host(batch, temperature, top_k, top_p, min_p)
        return jax.tree.map(jnp.asarray, made)

    @classmethod
    def on_host(
        cls, batch: int, temperature: _Numbers, top_k: _Numbers, top_p: _Numbers, min_p: _Numbers
    ) -> Sampling:
        """As `create`, with NumPy arrays, which `prefill` moves to the device."""

        def number(
            name: str,
            value: _Numbers,
            dtype: type[np.integer] | type[np.floating],
            accept: Callable[[float], bool],
            wanted: str,
        ) -> np.ndarray:
            return per_row(name, value, batch, dtype, accept, wanted)

        top_k_wanted = "a whole number, 0 (off) or greater"
        top_p_wanted, min_p_wanted = "in (0, 1]; 1 switches it off", "in [0, 1]; 0 switches it off"
        return cls(
            temperatures(temperature, batch),
            number("top_k", top_k, np.int32, is_count, top_k_wanted),
            number("top_p", top_p, np.float32, lambda v: 0 < v <= 1, top_p_wanted),
            number("min_p", min_p, np.float32, lambda v: 0 <= v <= 1, min_p_wanted),
        )


def temperatures(value: object, batch: int) -> np.ndarray:
    """Returns the temperature of each row [batch] float32, on the host.

    Raises:
      ValueError: a temperature that is not a number of 0 or greater.
    """
    return per_row("temperature", value, batch, np.float32, is_count, "0 (greedy) or greater")


def make_key(seed: int | Array | np.ndarray) -> Array:
    """Returns a PRNG key of `seed` for decoding, always of the implementation "threefry2x32".

    With this implementation the noise of a row depends only on the row's own key, as every exact
    rule requires.  Under `vmap`, JAX's "rbg" would draw the numbers of all rows from the first key
    alone.

    Example:
      >>> specjax.make_key(0) == specjax.make_key(0)
      Array(True, dtype=bool)
    """
    return jax.random.key(seed, impl=_IMPLEMENTATION)


def folded_keys(seeds: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Returns `jax.random.fold_in(make_key(seed), number)` of each row, [rows, 2] uint32.

    It is computed on the host, without a program: the bits are those of JAX.
    """
    zeros = np.zeros(seeds.shape, np.uint32)
    first, second, x, y = zeros, seeds.astype(np.uint32), zeros, numbers.astype(np.uint32)
    schedule = first, second, first ^ second ^ np.uint32(0x1BD11BDA)
    turns = (13, 15, 26, 6), (17, 29, 16, 24)
    x, y = x + schedule[0], y + schedule[1]
    for group in range(5):
        for turn in turns[group % 2]:
            x = x + y
            y = (y << np.uint32(turn) | y >> np.uint32(32 - turn)) ^ x
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return np.stack([x, y], axis=-1)


def keys_of_rows(key: Array | np.ndarray, rows: int) -> Array:
    """Returns `key` as [rows] typed keys.

    Raw keys of `jax.random.PRNGKey`, [rows, 2] uint32, are wrapped and give the same numbers.

    Raises:
      ValueError: the keys are not of the implementation "threefry2x32", or not of the shape [rows];
        traced keys are checked too.
    """
    cure = f"pass jax.random.split(specjax.make_key(seed), {rows})"
    typed(cure.removeprefix("pass "), jax.Array | np.ndarray, key=key)
    if key.dtype == np.uint32 and key.shape == (rows, 2):
        # jnp.asarray would compile a program for an array of the host.
        raw = key if isinstance(key, jax.Array) else jax.device_put(key)
        return jax.random.wrap_key_data(raw, impl=_IMPLEMENTATION)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(f"key is {key.dtype}{list(key.shape)} instead of {rows} PRNG keys; {cure}")
    if (implementation := str(jax.random.key_impl(key))) != _IMPLEMENTATION:
        raise ValueError(
            f'key has the implementation "{implementation}", with which a text would depend on the '
            f'other rows of its batch; decoding takes "{_IMPLEMENTATION}": {cure}'
        )
    if key.shape != (rows,):
        raise ValueError(f"key has the shape {key.shape} for {rows} rows; {cure}")
    return jnp.asarray(key)


def argmax(x: Array) -> Array:
    """Returns the index of the first maximum along the last axis, int32."""

    def first(x: Array, best: Array) -> Array:
        """Returns the index of the first number equal to `best` [..., 1]; the last if none is."""
        index = jnp.arange(x.shape[-1], dtype=jnp.int32)
        return jnp.min(jnp.where(x == best, index, x.shape[-1] - 1), axis=-1)

    def two_passes(x: Array) -> Array:
        # XLA:CPU vectorises the maximum, then the smallest index that holds it, but not argmax.
        size = x.shape[-1]
        block = next((block for block in _BLOCKS if size % block == 0 and size > block), None)
        if block is None:
            return first(x, x.max(-1, keepdims=True))
        # The second pass reads the maxima of blocks, and then a single block.  Without a barrier
        # XLA computes the maximum of the maxima from all numbers.
        blocks = jax.lax.stop_gradient(x).reshape(*x.shape[:-1], size // block, block)
        of_blocks = jax.lax.optimization_barrier(blocks.max(-1))
        best = of_blocks.max(-1, keepdims=True)
        at = first(of_blocks, best)
        inside = jnp.take_along_axis(blocks, at[..., None, None], axis=-2)[..., 0, :]
        return at * block + first(inside, best)

    def one_pass(x: Array) -> Array:
        return jax.lax.argmax(x, x.ndim - 1, jnp.int32)

    return on_cpu(two_passes, one_pass, x)


def top_k(x: Array, count: int) -> tuple[Array, Array]:
    """`jax.lax.top_k`: the greatest values [..., count] along the last axis, and their indices."""

    def sort(x: Array) -> tuple[Array, Array]:
        values, indices = jax.lax.top_k(x, count)
        return values, indices

    def one_by_one(x: Array) -> tuple[Array, Array]:
        # A TPU would sort the whole vocabulary.
        left = jnp.maximum(x, jnp.finfo(x.dtype).min)  # so that -inf means taken
        index, best = jnp.arange(x.shape[-1], dtype=jnp.int32), []
        for _ in range(count):
            best.append(argmax(left))
            left = jnp.where(index == best[-1][..., None], -jnp.inf, left)
        indices = jnp.stack(best, axis=-1)
        return jnp.take_along_axis(x, indices, axis=-1), indices

    return on_tpu(one_by_one, sort, x) if 0 < count <= _FEW else sort(x)


def warp(logits: Array, sampling: Sampling, triton: bool = False) -> Array:
    """Warps logits [B, N, V] to float32 logits of the sampled distribution, -inf where excluded.

    The order is that of transformers: temperature, top-k, top-p, min-p.  Tokens that tie with the
    last one kept are kept.

    Args:
      logits: of the model.
      sampling: settings, one per row.
      triton: filter with kernels of our own in a program for an NVIDIA GPU (`Model.triton`).

    Example:
      >>> import jax.numpy as jnp
      >>> greedy = specjax.Sampling.create(1, temperature=0.0)
      >>> specjax.warp(jnp.array([[[1.0, 3.0, 2.0]]]), greedy).argmax()
      Array(1, dtype=int32)
    """

    def rows(x: _Host) -> _Host:
        return x[:, None, None]

    greedy = rows(sampling.temperature == 0)
    scaled = logits.astype(jnp.float32) / rows(_divisor(sampling))

    def of_greedy(greedy: Array, x: Array) -> Array:
        return jax.lax.cond(greedy.any(), argmax, lambda x: jnp.zeros(x.shape[:-1], jnp.int32), x)

    # On a CPU it takes a twentieth of a wide pass, and only greedy rows and kernels use it.
    greatest = on_cpu(of_greedy, lambda greedy, x: argmax(x), greedy, logits)

    def filtered(x: Array) -> Array:
        if not triton:
            return _least_kept(x, sampling)
        settings = sampling.top_k, sampling.top_p, sampling.min_p
        return on_cuda(
            lambda x, best, *settings: kernels.least_kept_on_gpu(x, best, *settings),
            lambda x, best, *settings: _least_kept(x, sampling),
            x, greatest, *map(jnp.asarray, settings),
        )  # fmt: skip

    with jax.named_scope("filters"):
        least = jax.lax.cond(_filters(sampling), filtered, _keeps_all, scaled)
    scaled = _without(scaled, least)
    best = jnp.arange(logits.shape[-1]) == greatest[..., None]
    return jnp.where(greedy, jnp.where(best, 0.0, -jnp.inf), scaled)


def _divisor(sampling: Sampling) -> Array:
    """Returns what divides the logits of each row [B]."""
    temperature = jnp.maximum(sampling.temperature, _LEAST_TEMPERATURE)
    return jnp.where(sampling.temperature == 0, 1.0, temperature)


def _filters(sampling: Sampling) -> Array:
    """Returns whether any row has a filter."""
    filtering = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    return jnp.any((sampling.temperature > 0) & filtering)


def _keeps_all(x: Array) -> Array:
    return jnp.full((*x.shape[:-1], 1), -jnp.inf, jnp.float32)


def _least_kept(x: Array, sampling: Sampling) -> Array:
    """Returns the least numbers [B, N, 1] of x [B, N, V] that the filters keep.

    Filters run in branches, and XLA copies what a branch returns.  So a filter returns the least
    numbers that it keeps, and not all logits.
    """

    def rows(x: _Host) -> _Host:
        return x[:, None, None]

    def of_top_k(x: Array) -> Array:
        size = x.shape[-1]
        top_k = rows(jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, size), size))
        return _threshold(x, lambda kept: kept.astype(jnp.int32), top_k)

    def of_top_p(x: Array) -> Array:
        # Many devices flush a subnormal top_p to 0, which even an empty set of tokens reaches.
        tiny = jnp.finfo(jnp.float32).tiny
        probs, top_p = jax.nn.softmax(x), rows(jnp.maximum(sampling.top_p, tiny))
        least = _threshold(x, lambda kept: jnp.where(kept, probs, 0), top_p)
        return jnp.where(top_p >= 1, -jnp.inf, least)

    least = x.max(-1, keepdims=True) + jnp.log(rows(sampling.min_p))
    for on, of in ((sampling.top_k > 0, of_top_k), (sampling.top_p < 1, of_top_p)):
        found = jax.lax.cond(on.any(), of, _keeps_all, x)
        x = _without(x, found)
        least = jnp.maximum(least, found)
    return least


@struct.dataclass
class Drawn:
    """The token after each node, and what log-probabilities follow from."""

    token: Array  # [B, N] int32
    most: Array  # [B, N] the greatest logit
    total: Array  # [B, N, 2] log of the sum of exp(x - max x), of the logits and of the warped ones
    temperature: Array  # [B]; 0 is greedy

    def log_probabilities(self, logits: Array, node: Array, token: Array) -> tuple[Array, Array]:
        """Returns log-probabilities [B, T], the target's own and as drawn.

        Args:
          logits: [B, N, V] of the model.
          node: [B, T] after which each token was drawn.
          token: [B, T], kept by the filters.
        """

        def of_row(
            logits: Array, most: Array, total: Array, heat: Array, n: Array, t: Array
        ) -> tuple[Array, Array]:
            below = logits[n, t].astype(jnp.float32) - most[n]
            warped = jnp.where(heat == 0, 0.0, below / jnp.where(heat == 0, 1.0, heat))
            return below - total[n, 0], warped - total[n, 1]

        return jax.vmap(of_row)(logits, self.most, self.total, self.temperature, node, token)


def draws_at_once(key: Array, size: int) -> bool:
    """Returns whether `draw_at_once` draws from so many tokens in programs traced here."""
    ours = str(jax.random.key_impl(key)) == _IMPLEMENTATION and platform_of_shapes() == "cpu"
    return ours and kernels.takes_draws(size)


def draw_at_once(
    logits: Array,
    sampling: Sampling,
    key: Array,
    position: Array,
    sums: bool,
    otherwise: Callable[[], Array],
) -> Drawn:
    """Warps, draws and adds up in one pass, in a program for one CPU.

    Args:
      logits: [B, N, V].
      sampling: settings, one per row.
      key: [B] PRNG keys.
      position: [B, N] of the drawn tokens.
      sums: whether greedy rows have sums of exponentials, too.
      otherwise: returns the tokens [B, N] as XLA draws them.  Its program runs in the rare pass in
        which a token's lead is so small that XLA's rounding decides.
    """
    batch, nodes, size = logits.shape
    logits = logits.astype(jnp.float32)

    def filtered(x: Array) -> Array:
        scaled = x / _divisor(sampling)[:, None, None]
        kept = scaled >= _least_kept(scaled, sampling)
        return jnp.where(kept, x, jnp.inf).min(-1, keepdims=True)

    with jax.named_scope("filters"):
        least = jax.lax.cond(_filters(sampling), filtered, _keeps_all, logits)
    greedy = sampling.temperature == 0
    temperature = jnp.where(greedy, 0.0, _divisor(sampling))
    every = jnp.broadcast_to(jax.random.key_data(key)[:, None], (batch, nodes, 2))
    made = kernels.draws(
        logits.reshape(-1, size),
        every.reshape(-1, 2),
        position.astype(jnp.uint32).reshape(-1),
        jnp.repeat(temperature, nodes),
        least.reshape(-1),
        sums,
    )
    token, most, total = (
        x.reshape(batch, nodes, *x.shape[1:]) for x in (made.token, made.most, made.total)
    )
    token = jax.lax.cond(made.sure.all(), lambda: token, otherwise)
    return Drawn(token, most, jnp.log(total), temperature)


def scores(logits: Array, warped: Array, noise: Array | float) -> Array:
    """Returns [..., V] scores, of which the tokens with the greatest become siblings.

    Tokens that `warped` keeps score warped + noise.  All others score below them, in the order of
    `logits`, but for those that processors exclude in spite of greater logits.  So siblings are
    distinct even if `warped` keeps fewer tokens than there are siblings, as at temperature 0.

    Args:
      logits: [..., V] of the model that drafts.
      warped: [..., V] float32, the same logits after `warp`.
      noise: [..., V] Gumbel noise, or 0.
    """
    kept = warped > -jnp.inf
    drawn = warped + noise

    def lowest(x: Array, among: Array) -> Array:
        return jnp.where(among, x, jnp.inf).min(-1, keepdims=True)

    # A constraint may keep tokens that the model cannot draft, whose logits are -inf.
    least = lowest(logits, kept & (logits > -jnp.inf))
    rest = jnp.where(logits > least, _EXCLUDED, logits - least)
    return jnp.where(kept, drawn, lowest(drawn, kept) + rest)


def _without(x: Array, least: Array) -> Array:
    """Sets to -inf what is less than `least`."""
    return jnp.where(x < least, -jnp.inf, x)


def _threshold(x: Array, terms: Callable[[Array], Array], wanted: Array | _Host) -> Array:
    """Returns the greatest number t [..., 1] for which the sum of `terms(x >= t)` reaches `wanted`.

    If no number is small enough, it returns -inf.

    t is found by bisection over its 32 bits, in 32 passes over x.  On a CPU that is 15 to 30 times
    as fast as sorting, for vocabularies of 32 and 152 thousand (`bench/sampler.py`).
    """
    # The two zeros are one value.  XLA would leave out an addition of 0.
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    # Unsigned integers in the order of the floats.
    order = jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))

    def bit(i: Array, threshold: Array) -> Array:
        candidate = threshold | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        enough = terms(order >= candidate).sum(-1, keepdims=True) >= wanted
        return jnp.where(enough, candidate, threshold)

    def bisect(order: Array, none: Array) -> Array:
        return jax.lax.fori_loop(0, 32, bit, none)

    def in_few_passes(order: Array, none: Array) -> Array:
        # A GPU has no loop in its graphs, so the loop is unrolled, and a pass finds several bits.
        # XLA cuts a sum over a vocabulary into two kernels.  The second one of ours adds the parts
        # and chooses the threshold.
        numbers = jnp.arange(1, 1 << _BITS, dtype=jnp.uint32).reshape(-1, *[1] * order.ndim)
        parts = _PARTS if order.shape[-1] % _PARTS == 0 else 1

        def turn(i: Array, threshold: Array) -> Array:
            shift = jnp.uint32(32 - _BITS) - _BITS * i.astype(jnp.uint32)
            added = terms(order >= threshold | numbers << shift)
            sums = added.reshape(*added.shape[:-1], parts, -1).sum(-1)
            total = functools.reduce(jnp.add, (sums[..., n : n + 1] for n in range(parts)))
            held = total >= wanted
            return threshold | held.sum(0, dtype=jnp.uint32) << shift

        return jax.lax.fori_loop(0, 32 // _BITS, turn, none, unroll=True)

    none = jnp.zeros((*x.shape[:-1], 1), jnp.uint32)
    found = on_gpu(in_few_passes, bisect, order, none)
    bits = jnp.where(found >> 31, found ^ jnp.uint32(1 << 31), ~found)
    return jnp.where(found == 0, -jnp.inf, jax.lax.bitcast_convert_type(bits, jnp.float32))


def _gumbel(key: Array, number: Array | int, size: int) -> Array:
    """Returns Gumbel noise [size] of a key with a number folded in, by `jax.random.bits`.

    It is float32 even under x64: a key then always gives the same tokens.
    """

    def of_jax(key: Array, number: Array) -> Array:
        folded = jax.random.fold_in(key, number)
        return jax.random.gumbel(folded, (size,), jnp.float32, mode="low")

    def of_kernel(key: Array, number: Array) -> Array:
        return _gumbel_of(_random_bits(size)(jax.random.key_data(key), number))

    # XLA:CPU takes 5 to 15 times as long for the bits: JAX makes a loop of them.
    ours = str(jax.random.key_impl(key)) == _IMPLEMENTATION and platform_of_shapes() == "cpu"
    number = jnp.asarray(number).astype(jnp.uint32)
    if not ours or not kernels.takes_random_bits(size):
        return of_jax(key, number)
    return on_cpu(of_kernel, of_jax, key, number)


@functools.cache
def _random_bits(size: int) -> Callable[[Array, Array], Array]:
    """Returns a function that makes bits [..., size] of keys and numbers, in one call under vmap.

    It gets the data of the keys [..., 2], and the numbers [...] that are folded into them.
    """

    @jax.custom_batching.custom_vmap
    def bits(data: Array, number: Array) -> Array:
        made = kernels.random_bits(data.reshape(-1, data.shape[-1]), number.reshape(-1), size)
        return made.reshape(*data.shape[:-1], size)

    @bits.def_vmap
    def together(
        count: int, batched: Sequence[bool], data: Array, number: Array
    ) -> tuple[Array, bool]:
        every = (
            x if known else jnp.broadcast_to(x, (count, *x.shape))
            for x, known in zip((data, number), batched, strict=True)
        )
        return bits(*every), True

    return bits


def _gumbel_of(bits: Array) -> Array:
    """Returns the noise that `jax.random.gumbel` makes of its bits."""
    tiny, one = jnp.finfo(jnp.float32).tiny, jnp.float32(1)
    mantissa = bits >> 9 | jax.lax.bitcast_convert_type(one, jnp.uint32)
    uniform = jax.lax.bitcast_convert_type(mantissa, jnp.float32) - one
    uniform = jnp.maximum(tiny, uniform * (one - tiny) + tiny)
    return -jnp.log(-jnp.log(uniform))


class _WithoutDraws:
    """The draws that a rule with `shared_noise` does not have."""

    def acceptance(self, num_nodes: int) -> Array:
        raise TypeError("a rule with shared_noise=True has no acceptance draws: set it to False")

    def residual(self) -> Array:
        raise TypeError("a rule with shared_noise=True has no residual draw: set it to False")


@struct.dataclass
class SharedDraw(_WithoutDraws):
    """The noise keyed by row and absolute position, the same for proposer and rule.

    The text of a row then depends on its key and not on the proposer (Daliri, Musco, Suresh 2024,
    arXiv 2408.07978).
    """

    gumbel: Array  # [B, D + 1, V]; gumbel[:, d] draws the token after a node of depth d

    @classmethod
    def create(
        cls, key: Array, position: Array, max_depth: int, size: int, sampled: Array
    ) -> SharedDraw:
        """Returns the noise of one step.

        Args:
          key: [B] PRNG keys of the rows.
          position: [B] positions of the roots.
          max_depth: D.
          size: V.
          sampled: [] bool; False if every row is greedy, and then no noise is computed.
        """

        def noise() -> Array:
            at = jnp.arange(max_depth + 1)
            return jax.vmap(lambda draw: draw.noise(at, at))(PositionDraw(key, position, size))

        empty = jnp.zeros((key.shape[0], max_depth + 1, size), jnp.float32)
        return cls(jax.lax.cond(sampled, noise, lambda: empty))

    def noise(self, node: Array, depth: Array) -> Array:
        """Returns Gumbel noise [M, V] of one row, for the children of nodes at `depth` [M]."""
        del node
        levels = range(1, len(self.gumbel))

        def gather(gumbel: Array, depth: Array) -> Array:
            return gumbel[depth]

        def select(gumbel: Array, depth: Array) -> Array:
            # A gather of whole rows is written to memory; this is part of what reads it.
            noise = jnp.broadcast_to(gumbel[0], (len(depth), gumbel.shape[1]))
            for level in levels:
                noise = jnp.where(depth[:, None] == level, gumbel[level], noise)
            return noise

        return on_cpu(gather, select if len(levels) < _FEW else gather, self.gumbel, depth)


@struct.dataclass
class PositionDraw(_WithoutDraws):
    """The noise of `SharedDraw`, computed at each use."""

    key: Array  # [B] PRNG keys of the rows
    position: Array  # [B] positions of the roots
    size: int = struct.field(pytree_node=False)

    def noise(self, node: Array, depth: Array) -> Array:
        """Returns the noise of one row, as `SharedDraw.noise`."""
        del node
        return jax.vmap(lambda at: _gumbel(self.key, at, self.size))(self.position + 1 + depth)


@struct.dataclass
class IndependentDraw:
    """Separate noise for the proposer's draws, the acceptance draws and the residual draw."""

    key: Array  # [B] the row's key with its position folded in, so every step has its own key
    size: int = struct.field(pytree_node=False)
    num_nodes: int = struct.field(pytree_node=False)  # the most that `acceptance` is asked for

    @classmethod
    def create(cls, key: Array, position: Array, size: int, num_nodes: int) -> IndependentDraw:
        """Makes the streams from the rows' keys [B] and root positions [B], and V."""
        return cls(jax.vmap(jax.random.fold_in)(key, position), size, num_nodes)

    def _stream(self, stream: int) -> Array:
        return jax.random.fold_in(self.key, stream)

    def noise(self, node: Array, depth: Array) -> Array:
        """Returns Gumbel noise [M, V] of one row for the children of the nodes `node` [M]."""
        del depth
        stream = self._stream(_PROPOSE)
        return jax.vmap(lambda n: _gumbel(stream, n, self.size))(node)

    def acceptance(self, num_nodes: int) -> Array:
        """Returns uniform draws [N] in [0, 1) of one row."""
        # All of them, so that the first ones do not depend on how many nodes the target reads.
        drawn = jax.random.uniform(self._stream(_ACCEPT), (self.num_nodes,), jnp.float32)
        return drawn[:num_nodes]

    def residual(self) -> Array:
        """Returns Gumbel noise [V] of one row, for the residual or bonus token."""
        return _gumbel(self.key, _RESIDUAL, self.size)
