"""A request that is prepared from the arguments of `generate`."""

from __future__ import annotations

from typing import Any

from specjax.generation import Prepared, load_named, prepare
from specjax.generation.request import make_request


def prepared(
    target: Any,
    prompts: Any = None,
    *,
    stream: Any = False,
    mesh: Any = None,
    draft_mesh: Any = None,
    **options: Any,
) -> Prepared:
    """What `specjax.generate` with these arguments decodes.

    Raises:
      ValueError: whatever `generate` refuses.
    """
    request = load_named(target, make_request(prompts, options), mesh, draft_mesh)
    return prepare(target, request, stream=stream, mesh=mesh, draft_mesh=draft_mesh)
