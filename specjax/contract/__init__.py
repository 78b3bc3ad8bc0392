"""The contract: the base classes of models, caches, proposers, sources and rules.

Every attribute is declared here, with its default if it has one.  If a class lacks a method or an
attribute, building an object of it fails with the missing name, before anything is traced.

    Decoder = target Model + Proposer + Rule
    Proposer = a shape (chain, static tree, dynamic tree) over a Source (a draft model, heads, ...)

The parts are frozen, hashable and hold no arrays; those are in `Params` and `DecodeState`.

To *read* tokens means to run a forward pass over them.  A pass *stages* the keys and values of its
tokens in the cache, after the committed ones; `Cache.commit` then keeps some of them.
"""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.contract.cache import Cache, refuse_path, refuse_taps
    from specjax.contract.declared import Part
    from specjax.contract.model import Loaded, Model
    from specjax.contract.proposer import Context, Proposer
    from specjax.contract.resting import Resting
    from specjax.contract.rule import Rule
    from specjax.contract.settled import Settled
    from specjax.contract.source import BlockSource, Lookahead, Source
    from specjax.contract.variables import CacheT, MemoryT, ParamsT, ReadingT, StateT
    from specjax.contract.wrapper import Wrapper
    from specjax.types import Arrays, ArrayTree, Corrected, Draw, Warp, Weights

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "ArrayTree",
    "Arrays",
    "BlockSource",
    "Cache",
    "CacheT",
    "Context",
    "Corrected",
    "Draw",
    "Loaded",
    "Lookahead",
    "MemoryT",
    "Model",
    "ParamsT",
    "Part",
    "Proposer",
    "ReadingT",
    "Resting",
    "Rule",
    "Settled",
    "Source",
    "StateT",
    "Warp",
    "Weights",
    "Wrapper",
    "refuse_path",
    "refuse_taps",
]
