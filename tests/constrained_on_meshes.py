"""Run by `tests/process/test_constraint_campaign.py` with four devices: constrained texts on a mesh
are those of one device, under automata on the devices and under grammars, whose matchers are on
the host."""

from typing import Any

import constrained

import specjax
from specjax import Choice, Grammar, JSONSchema, Regex

CONSTRAINTS = [
    Regex("(yes|no)( [a-z]{1,6}){0,3}"),
    None,
    JSONSchema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, ""),
    Choice(["return self", "return None"]),
]


GRAMMARS = [
    Grammar([*constrained.GRAMMARS][1]),
    None,
    CONSTRAINTS[2],
    Grammar(constrained.TREE, ""),
]


def main() -> None:
    models = constrained.load()
    prompts = [models.text[40 * n : 40 * n + 9 + n] for n in range(4)]
    drafter = constrained.drafting(models, "forced then draft")["drafter"]
    for constraints in (CONSTRAINTS, GRAMMARS):
        found = []
        for mesh in (None, specjax.make_mesh(data=2, model=2)):
            output = specjax.generate(
                models.target, prompts, drafter=drafter, constraint=constraints, max_new_tokens=24,
                temperature=1.0, mesh=mesh,
            )  # fmt: skip
            for constraint, *made in zip(
                constraints, output.text, output.tokens, output.finish, strict=True
            ):
                check(models, constraint, *made)
            found.append(output.tokens)
        assert found[0] == found[1], found
    print("equal")


def check(
    models: constrained.Models,
    constraint: Any,
    text: str,
    tokens: list[int],
    finish: str,
) -> None:
    """A text of a grammar may be cut by the limit; others are complete."""
    if isinstance(constraint, Grammar):
        ended = finish == "eos"
        assert constrained.begins(models.target, constraint, tokens[: len(tokens) - ended]), text
        assert not ended or constrained.complete(constraint, text), text
    else:
        assert constrained.complete(constraint, text), text


if __name__ == "__main__":
    main()
