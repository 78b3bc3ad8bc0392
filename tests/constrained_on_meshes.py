"""Run by `tests/test_constraint_campaign.py` with four devices: constrained texts on a mesh are
those of one device."""

import constrained

import specjax
from specjax import Choice, JSONSchema, Regex

CONSTRAINTS = [
    Regex("(yes|no)( [a-z]{1,6}){0,3}"),
    None,
    JSONSchema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, ""),
    Choice(["return self", "return None"]),
]


def main() -> None:
    models = constrained.load()
    prompts = [models.text[40 * n : 40 * n + 9 + n] for n in range(4)]
    found = []
    for mesh in (None, specjax.make_mesh(data=2, model=2)):
        output = specjax.generate(
            models.target, prompts, drafter=constrained.drafting(models, "forced then draft")[
                "drafter"
            ], constraint=CONSTRAINTS, max_new_tokens=24, temperature=1.0, mesh=mesh,
        )  # fmt: skip
        assert all(map(constrained.complete, CONSTRAINTS, output.text)), output.text
        found.append(output.tokens)
    assert found[0] == found[1], found
    print("equal")


if __name__ == "__main__":
    main()
