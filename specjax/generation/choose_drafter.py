"""Chooses the drafter of a request from its drafter, draft or proposer, which are loaded."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from specjax._internal.checks import each, hashable, instance, items, settle, shown, whole
from specjax.contract import Proposer, Rule
from specjax.decoding import Decoder
from specjax.drafters import (
    CHAIN,
    adaptive,
    as_chain,
    automatic,
    drafter_by_name,
    expecting,
    on_demand,
)
from specjax.generation.request import DEPTH, Request
from specjax.methods import (
    BoundDrafter,
    Drafter,
    first_of,
    make_drafter,
    window_draft,
    with_draft,
)
from specjax.models import LanguageModel, for_several_devices
from specjax.parallel import alike, mesh_of
from specjax.proposers import NoProposer
from specjax.rules import Match
from specjax.tuning import about, saved_plan, weights_of


def choose_drafter(
    target: LanguageModel,
    request: Request,
    rule: Rule,
    temperature: np.ndarray,
    mesh: Mesh | None,
    context: int,
) -> tuple[Drafter, np.ndarray | None]:
    """Returns the drafter, and the greatest depth of each row's drafts [B]; None sets no limit.

    `temperature` [B] is that of each row, and `context` the tokens of the longest text.

    Raises:
      ValueError: parts that do not fit each other or the target; the message has the fix.
    """
    depth, drafts = drafts_of(target, request.num_drafts, len(temperature))
    draft = _draft(request.draft, request.draft_window, mesh)
    beside = f"with draft={draft and draft.name}"
    kind = request.draft_dtype
    on = None if draft is None else mesh_of(draft.params)
    settle(
        (
            kind is not None
            and (draft is None or not isinstance(kind, str) or kind not in ("int8", "int4")),
            f'draft_dtype={shown(kind)} {beside}; pass "int8" together with draft=, or "int4"',
        ),
        (
            on is not None and (mesh is None or not alike(on, mesh)),
            f"the draft {draft and draft.name!r} is on another mesh than {target.name!r}: load "
            "both with the same mesh=",
        ),
    )
    drafter = _drafter(target, request, rule, draft, max(depth, 1), temperature, context)
    if depth == 0:
        return BoundDrafter(NoProposer()), drafts
    proposer = drafter.proposer
    if request.expected is not None and proposer.max_depth and not proposer.reads_documents:
        drafter = first_of(expecting(proposer.max_depth), drafter)
    return drafter, drafts


def _by_plan(
    target: LanguageModel, auto: Drafter, trees: Drafter, temperature: np.ndarray, context: int
) -> Drafter:
    """Returns `auto`, or the faster drafter of a saved plan that was made from `trees`."""
    decoder = Decoder(target.model, auto.proposer, Match())
    weights, samples = weights_of(target, auto), bool((temperature > 0).any())
    plan = saved_plan(about(decoder, weights, len(temperature), samples, context))
    faster = None if plan is None or plan.tree is None else plan.tree.made_from(trees)
    return auto if faster is None else faster


def drafts_of(
    target: LanguageModel, num_drafts: object, rows: int
) -> tuple[int, np.ndarray | None]:
    """Returns the depth for a draft model, and each row's greatest depth (None: no limit)."""
    if num_drafts is None:
        return DEPTH, None
    most = target.model.max_positions
    wanted = (
        f"a whole number, 0 (plain) or greater, and at most {most}, the positions of {target.name}"
    )
    depths = [
        whole("num_drafts", value, 0, most, wanted)
        for value in each("num_drafts", num_drafts, rows)
    ]
    # A single 0 selects the program of plain decoding.  A 0 in a list is for its own row only, and
    # the program still drafts.
    depth = depths[0] if items(num_drafts) is None else max([1, *depths])
    return depth, np.array(depths, np.int32)


def _auto(
    target: LanguageModel,
    request: Request,
    rule: Rule,
    drafts: LanguageModel | Drafter | None,
    depth: int,
    temperature: np.ndarray,
    context: int,
) -> Drafter:
    """Returns the drafter of `proposer="auto"`, and of a request that names no drafter.

    `drafts` is a draft model, or the drafter that was passed with `proposer="auto"`.

    Its choices follow measured times, so a seed gives one text only if the text does not depend on
    the drafts.  Elsewhere the default is the draft, or else plain decoding.
    """
    named, numbered, why = request.proposer is not None, request.num_drafts is not None, None
    if not rule.fixes_text():
        why = f"the rule {type(rule).__name__}, under which a text would depend on measured times"
    elif not target.model.reads_trees:
        why = f"{target.name!r}, since every pass over its cache must have one width"
    elif jax.process_count() > 1:
        why = "several processes, since each would measure other times"
    if named and why is not None:
        raise ValueError(
            f'proposer="auto" cannot be used with {why}; pass proposer="ngram", or leave it out'
        )
    if isinstance(drafts, Drafter):
        # Rows of a chain drop the drafts beyond `num_drafts`.
        trees = not drafts.proposer.is_chain
        chain = as_chain(drafts, depth if numbered and trees else None)
        deep = chain.proposer.max_depth
        lookup = expecting(deep) if request.expected is not None else None
        chosen = on_demand(adaptive(chain, lookup))
        # The tree of a plan has all of its drafts, and none of them is from a document.
        follows = trees and not numbered and request.documents is None and request.expected is None
        return _by_plan(target, chosen, drafts, temperature, context) if follows else chosen
    kind, draft, expects = request.draft_dtype, drafts, request.expected is not None
    if why is None and (named or draft is None or not numbered):
        return automatic(target, draft, kind, depth if numbered else CHAIN, expects)
    if draft is None:
        return BoundDrafter(expecting(depth) if expects else NoProposer())
    return make_drafter(target, draft, num_drafts=depth, dtype=kind)


def _drafter(
    target: LanguageModel,
    request: Request,
    rule: Rule,
    draft: LanguageModel | None,
    depth: int,
    temperature: np.ndarray,
    context: int,
) -> Drafter:
    asked = request.proposer if request.drafter is None else request.drafter
    if asked is None or (isinstance(asked, str) and asked == "auto"):
        return _auto(target, request, rule, draft, depth, temperature, context)
    if request.drafter is not None:
        is_auto = isinstance(request.proposer, str) and request.proposer == "auto"
        if is_auto and isinstance(request.drafter, Drafter) and draft is None:
            return _auto(target, request, rule, request.drafter, depth, temperature, context)
        fields = {"draft": request.draft, "proposer": request.proposer}
        others = [name for name, value in fields.items() if value is not None]
        if others:
            raise ValueError(
                f"drafter= comes with its proposer and weights: leave {' and '.join(others)}= out"
                ' (or pass it with proposer="auto" alone)'
            )
        asked = instance("drafter", asked, Drafter, "what a loader such as load_drafter returns")
    if isinstance(asked, str):
        numbers = {} if request.num_drafts is None else {"num_drafts": depth}
        return drafter_by_name(asked, target, draft, request.draft_dtype, **numbers)
    if isinstance(asked, Drafter):
        if draft is not None:
            raise ValueError(
                f"a {type(asked).__name__} uses no draft model: "
                "pass either draft= or proposer=, not both"
            )
        return asked
    if isinstance(asked, type):
        raise ValueError(
            f"proposer={shown(asked)} is a class; "
            f"pass one of its objects, such as {asked.__name__}(...)"
        )
    asked = instance("proposer", asked, Proposer, 'one such as NGram(), or a name such as "ngram"')
    hashable("proposer", asked)
    return (
        BoundDrafter(asked)
        if draft is None
        else with_draft(target, draft, asked, request.draft_dtype)
    )


def _draft(draft: object, window: object, mesh: Mesh | None) -> LanguageModel | None:
    if draft is None:
        if window is not None:
            raise ValueError(f"draft_window={shown(window)} is used with draft=; leave it out")
        return draft
    cure = "what specjax.load(folder) returns, a folder, or org/name"
    loaded = instance("draft", draft, LanguageModel, cure)
    if window is not None:
        wanted = "a whole number of tokens, at least 1"
        loaded = window_draft(loaded, whole("draft_window", window, 1, 2**31 - 1, wanted))
    return for_several_devices(loaded) if mesh is not None and mesh.size > 1 else loaded
