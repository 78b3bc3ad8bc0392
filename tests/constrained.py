"""Random constrained calls of `generate`:

    python -m tests.constrained --cases 1000 --seed 1

A case is four prompts with a constraint each (a random schema, an expression, a choice, or none; in
each third case grammars, too), a proposer, a rule, temperatures, lengths, and often a stop string
or a least length.  Every text that was not cut by a stop must be complete, as `re` and `jsonschema`
judge it; a text that was cut, also one of a grammar at its limit, must be the beginning of one.
Under `match`, and at temperature 0, the tokens must be those of plain constrained decoding.  A
failure prints the seed of its case, and `--only SEED` repeats that case.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import re
import sys
import tempfile
import time
import warnings
from typing import Any

import jsonschema
import numpy as np

import specjax
from specjax import Choice, Grammar, JSONSchema, Regex
from specjax.constraints import automaton_of, matchers_of

ROOT = pathlib.Path(__file__).parent.parent / "checkpoints"
ROWS, LONGEST, PROMPT = 4, 64, 24
RULES = ("match", "match", "rejection", "block")
PROPOSERS = ("forced", "ngram", "draft", "tree", "dynamic-tree", "forced then draft", "foreign",
             "auto", "none")  # fmt: skip
TREES = ("tree", "dynamic-tree")
EXPRESSIONS = (
    r"[0-9]{1,3}(\.[0-9]{1,3}){3}", r"(yes|no|maybe)( [a-z]+){0,3}", r"def [a-z_]+\(self\):",
    r"#[0-9a-f]{6}|rgb\([0-9]{1,3}(, [0-9]{1,3}){2}\)", r"[^a]{2,9}a", r"(é|日本|x)*!",
    r"-?[0-9]+(\.[0-9]+)?", r"a?b?c?d?", r"(\w+ ){2}\w+", r".{5}",
)  # fmt: skip
WORDS = ("return", "self", "return self.x", "", "def f(x):", "naïve", "日本", " a", "\n")
NAMES = ("id", "name", "a b", "level", "größe", "x.y", "in_stock", 'q"k')

TREE = {
    "type": "object",
    "properties": {
        "v": {"type": ["integer", "string"], "maxLength": 4},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["v", "next"],
    "additionalProperties": False,
}
NUMBER, WORD = "[0-9]{1,3}", "[a-z]{1,4}"
GRAMMARS = {
    f'start: sum\nsum: term (("+" | "*") term)*\nterm: /{NUMBER}/ | "(" sum ")"\n': (
        rf"\({NUMBER}([+*]{NUMBER})*\)", "0", f"{NUMBER}([+*]{NUMBER})*",
    ),
    'start: "a" start "b" | "c" start "d" | "é"\n': ("aéb|céd", "é", "é"),
    'root ::= "[" (root (", " root)*)? "]" | [a-z] [a-z]? [a-z]? [a-z]?\n': (
        rf"\[({WORD}(, {WORD})*)?\]", "x", WORD,
    ),
}  # fmt: skip
"""Grammars, and how a text of each is judged: replace the first expression by the text until
nothing changes, and match the last expression."""


@dataclasses.dataclass(frozen=True)
class Models:
    """What the cases decode with: a pair, and a draft with another tokenizer."""

    target: specjax.LanguageModel
    draft: specjax.LanguageModel
    foreign: specjax.LanguageModel
    text: list[int]  # tokens to take prompts from


def load() -> Models:
    target, draft = (specjax.load(ROOT / "tiny" / name, "float32") for name in ("target", "draft"))
    foreign = specjax.load(ROOT / "pycode" / "draft", "float32")
    source = pathlib.Path(specjax.__file__).parent / "tree.py"
    assert target.tokenizer is not None
    return Models(target, draft, foreign, target.tokenizer.encode(source.read_text()).ids)


def schema(drawn: np.random.Generator, depth: int = 2) -> dict[str, Any]:
    """A random schema of the keywords that are kept."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "pattern", "lengths",
             "nullable", "date"]  # fmt: skip
    kinds += ["object", "object", "array", "anyOf"] * (depth > 0)
    kind = str(drawn.choice(kinds))
    if kind == "object":
        names = drawn.permutation(NAMES)[: drawn.integers(1, 4)].tolist()
        required = [name for name in names if drawn.random() < 0.6]
        properties = {name: schema(drawn, depth - 1) for name in names}
        return {"type": "object", "properties": properties, "required": required}
    if kind == "array":
        least = int(drawn.integers(0, 3))
        own = {"type": "array", "items": schema(drawn, depth - 1), "minItems": least}
        return own | ({"maxItems": least + 1} if drawn.random() < 0.5 else {})
    if kind == "anyOf":
        return {"anyOf": [schema(drawn, depth - 1) for _ in range(2)]}
    values = ["a", 'q"uote', "é", 1, -2.5, None, True, {"k": [1, "v"]}, [], {'a"b': 2**70, "$": []}]
    patterns = ["^[a-z]{2,5}(-[0-9]+)?$", r"^\w[^,]{1,3}.$"]
    return {
        "enum": {"enum": [values[n] for n in drawn.permutation(len(values))[:3]]},
        "pattern": {"type": "string", "pattern": patterns[drawn.integers(2)]},
        "lengths": {"type": "string", "minLength": 1, "maxLength": int(drawn.integers(1, 9))},
        "nullable": {"type": ["integer", "null"]},
        "date": {"type": "string", "format": "date"},
    }.get(kind, {"type": kind})


def constraint(drawn: np.random.Generator) -> Any:
    kind = drawn.integers(6)
    if kind == 0:
        return None
    if kind == 1:
        words = [word for word in drawn.permutation(WORDS).tolist() if word]
        return Choice(words[: drawn.integers(1, 5)], canonical=bool(drawn.integers(2)))
    if kind == 2:
        return Regex(str(drawn.choice(EXPRESSIONS)))
    return JSONSchema(schema(drawn), str(drawn.choice(["[ ]?", "", r"[ \n]{0,2}"])),
                      canonical=bool(drawn.integers(2)))  # fmt: skip


def grammar(drawn: np.random.Generator) -> Grammar:
    texts = [*GRAMMARS, TREE]
    return Grammar(texts[drawn.integers(len(texts))])


def complete(constraint: Any, text: str) -> bool:
    """Is it one of the texts?"""
    if isinstance(constraint, Grammar) and not constraint.is_schema:
        inner, to, whole = GRAMMARS[str(constraint.grammar)]
        while (shorter := re.sub(inner, to, text)) != text:
            text = shorter
        return re.fullmatch(whole, text) is not None
    if isinstance(constraint, Grammar):
        jsonschema.validate(json.loads(text), json.loads(str(constraint.grammar)))
    if isinstance(constraint, Choice):
        return text in constraint.texts
    if isinstance(constraint, Regex):
        return re.fullmatch(constraint.expression, text) is not None
    if isinstance(constraint, JSONSchema):
        assert isinstance(constraint.schema, str)
        jsonschema.validate(json.loads(text), json.loads(constraint.schema))
    return True


def begins(target: specjax.LanguageModel, constraint: Any, tokens: list[int]) -> bool:
    """Do these tokens begin a text?"""
    if isinstance(constraint, Grammar):
        begun, _ = matchers_of(target, constraint, [list(target.eos)])
        assert begun is not None and begun[0] is not None
        return all(map(begun[0]().push, tokens))
    automaton = automaton_of(target, constraint)
    state = automaton.start
    for token in tokens:
        state = int(automaton.next[state, automaton.classes[token]])
        if state < 0:
            return False
    return True


def drafting(models: Models, name: str) -> dict[str, Any]:
    if name == "foreign":
        return {"draft": models.foreign, "num_drafts": 3}
    if name == "forced then draft":
        chain = specjax.make_drafter(models.target, models.draft, num_drafts=3)
        return {"drafter": specjax.first_of(specjax.Forced(3), chain)}
    drafted = {"draft": models.draft} if name in ("draft", *TREES) else {}
    return {"proposer": name, **drafted}


def case_of(models: Models, seed: int) -> tuple[list[list[int]], dict[str, Any], str, str]:
    """The prompts of a seed, the options of plain decoding, and the proposer and the rule."""
    drawn = np.random.default_rng(seed)
    name = PROPOSERS[int(drawn.integers(len(PROPOSERS)))]
    rules = [rule for rule in RULES if not (rule == "block" and name in TREES)]
    rule = "match" if name == "auto" else str(drawn.choice(rules))
    lengths = drawn.integers(1, PROMPT + 1, ROWS).tolist()
    starts = drawn.integers(0, len(models.text) - PROMPT, ROWS).tolist()
    prompts = [models.text[s : s + n] for s, n in zip(starts, lengths, strict=True)]
    asked = [constraint(drawn) for _ in range(ROWS)]
    if seed % 3 == 2:
        again = np.random.default_rng([seed, 1])
        asked = [grammar(again) if again.random() < 0.5 else one for one in asked]
    least = [
        0
        if one is None or isinstance(one, Grammar)
        else int((a := automaton_of(models.target, one)).shortest[a.start])
        for one in asked
    ]
    asked = [one if need <= LONGEST else None for one, need in zip(asked, least, strict=True)]
    new = max([1, *(need for need in least if need <= LONGEST)])
    greedy = rule != "match" and drawn.random() < 0.5
    heat = np.zeros(ROWS) if greedy else drawn.choice([0.0, 0.7, 1.0, 1.5], ROWS)
    options: dict[str, Any] = {
        "constraint": asked,
        "max_new_tokens": int(drawn.integers(new, LONGEST + 1)),
        "temperature": heat.tolist(),
        "top_k": drawn.choice([0, 0, 4, 40], ROWS).tolist(),
        "top_p": drawn.choice([1.0, 1.0, 0.9], ROWS).tolist(),
        "seed": int(drawn.integers(2**32)),
        "logprobs": 1,
        "stop": [[], [], [], ["e"], ['"', "0"]][drawn.integers(5)],
    }
    return prompts, options, name, rule


def check(models: Models, seed: int) -> collections.Counter[str]:
    """Run the case of a seed.  Returns what it met."""
    prompts, options, name, rule = case_of(models, seed)
    made = specjax.generate(models.target, prompts, rule=rule, **drafting(models, name), **options)
    met = collections.Counter({f"proposer {name}": 1, f"rule {rule}": 1})
    for one, text, tokens, finish in zip(
        options["constraint"], made.text, made.tokens, made.finish, strict=True
    ):
        kind = type(one).__name__
        met.update([f"texts of {kind}", f"texts ended by {finish}"])
        if one is None:
            continue
        ended = finish == "eos"
        assert begins(models.target, one, tokens[: len(tokens) - ended]), (one, tokens)
        if ended or (finish != "stop" and not isinstance(one, Grammar)):
            assert complete(one, text), (one, text)
    if rule == "match" or not any(options["temperature"]):
        plain = specjax.generate(models.target, prompts, proposer="none", **options)
        assert made.tokens == plain.tokens, (made.text, plain.text)
        met["cases equal to plain decoding"] += 1
    met["drafts accepted"] += int(made.stats.mean_accepted_length > 1)
    return met


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--only", type=int, help="run the case of this seed alone")
    asked = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message=".*tokens.*")
    models, started = load(), time.perf_counter()
    seeds = [asked.only] if asked.only is not None else range(asked.seed, asked.seed + asked.cases)
    met: collections.Counter[str] = collections.Counter()
    for done, seed in enumerate(seeds):
        try:
            met += check(models, seed)
        except BaseException:
            print(f"failed: python -m tests.constrained --only {seed}", file=sys.stderr)
            raise
        if done % 50 == 49:
            print(f"{done + 1} cases, {time.perf_counter() - started:.0f} s", flush=True)
    print(f"\n| {len(seeds)} cases | |\n|---|---|")
    for name, count in sorted(met.items()):
        print(f"| {name} | {count} |")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        import os

        os.environ.setdefault("SPECJAX_CACHE", folder)
        main()
