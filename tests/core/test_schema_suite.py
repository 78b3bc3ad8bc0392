"""`JSONSchema` beside the cases of the JSON Schema Test Suite.

Each case is an instance and whether it is valid.  An automaton agrees if it allows the JSON of a
valid instance and forbids that of another one.  What the documented layout leaves out is listed in
`LAYOUT`.  A schema that the library refuses decides nothing; most do not say a type, so each is
tried a second time with the types that its keywords are about.
"""

import collections
import json
import pathlib

import jsonschema
from automata_of_bytes import accepts

from specjax import JSONSchema

SUITE = json.loads(
    (
        pathlib.Path(__file__).parents[1] / "fixtures" / "json_schema_suite" / "tests.json"
    ).read_text()
)
HEADS = {"$ref", "anyOf", "allOf", "enum", "const", "type", "not", "if", "oneOf"}
ABOUT = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
SCALARS = {"type": ["string", "number", "boolean", "null"]}


def completed(schema):
    """A schema with a type wherever it says none, which allows some of the same values."""
    if schema is True:
        return SCALARS
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    if not HEADS & set(made):
        kinds = [kind for kind, names in ABOUT.items() if names & set(made)]
        made["type"] = kinds or SCALARS["type"]
    kinds = made.get("type", [])
    if "object" in kinds:
        made.setdefault("properties", {name: True for name in made.get("required", [])})
    if "array" in kinds and "prefixItems" not in made:
        made.setdefault("items", True)
    for name in ("properties", "$defs", "definitions"):
        if isinstance(made.get(name), dict):
            made[name] = {key: completed(one) for key, one in made[name].items()}
    for name in ("anyOf", "allOf", "prefixItems", "items"):
        if isinstance(made.get(name), list):
            made[name] = [completed(one) for one in made[name]]
    if "items" in made and not isinstance(made["items"], list) and "prefixItems" not in made:
        made["items"] = completed(made["items"])
    return made


def texts(instance, names):
    """The JSON of an instance with keys in the order of `names`, and with 2 for 2.0."""
    if isinstance(instance, dict):
        order = sorted(instance, key=lambda name: names.index(name) if name in names else 0)
        instance = {name: instance[name] for name in order}
    plain = json.loads(
        json.dumps(instance), parse_float=lambda text: int(float(text))
        if float(text).is_integer() else float(text),
    )  # fmt: skip
    return {json.dumps(one, ensure_ascii=False) for one in (instance, plain)}


def declared(schema):
    """The names of the properties of a schema, in their order."""
    if isinstance(schema, list):
        return [name for part in schema for name in declared(part)]
    if not isinstance(schema, dict):
        return []
    own = list(schema["properties"]) if isinstance(schema.get("properties"), dict) else []
    return own + [name for part in schema.values() for name in declared(part)]


def keys(instance):
    parts = instance.values() if isinstance(instance, dict) else instance
    if isinstance(instance, dict | list):
        return {
            *(instance if isinstance(instance, dict) else ()),
            *(k for p in parts for k in keys(p)),
        }
    return set()


LAYOUT = {
    "a pattern matches the whole of a string": {
        "matches a substring", "ascii character in json string", "ascii characters match",
        "literal unicode character in json string", "unicode character in hex format in string",
    },
    "other control characters are not written where a pattern is": {
        "Line tabulation matches", "Non-whitespace control matches",
    },
    "all items of prefixItems are written, and no others": {
        "incomplete array of items", "array with additional items", "empty array",
        "empty array is valid", "fewer items is valid", "array with one item is valid",
        "fewer number of items present (1)", "fewer number of items present (2)",
        "only the first item is validated",
    },
    "times have no leap seconds, and capitals": {
        "a valid date-time with a leap second, UTC", "case-insensitive T and Z",
        "a valid date-time with a leap second, with minus offset",
        "a valid time string with leap second, Zulu", "valid leap second, zero time-offset",
        "valid leap second, positive time-offset", "valid leap second, large positive time-offset",
        "valid leap second, negative time-offset", "valid leap second, large negative time-offset",
        "a valid time string with case-insensitive Z",
    },
    "a value of const is written as its JSON, so -2.0 is not -2": {"integer -2 is valid"},
    "other keys do not occur, which holds for each schema of anyOf": {"both anyOf valid (complex)"},
}  # fmt: skip
"""What the documented layout leaves out, and the valid instances of which that is true.  Instances
with keys that the schema does not have are not listed."""

LEFT_OUT = set().union(*LAYOUT.values())


def judged(schema):
    """A schema for jsonschema, whose patterns and formats are Python's: the suite judges these."""
    if isinstance(schema, list):
        return [judged(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: judged(part) for name, part in schema.items()}
    return {name: one for name, one in kept.items() if not isinstance(one, str) or name not in
            ("pattern", "format")}  # fmt: skip


def decided(schema, group, narrower):
    """What the automaton of a schema decides: a list of verdicts, or None if it is refused."""
    try:
        automaton = JSONSchema(schema).compile()
    except ValueError:
        return None
    names, found = declared(schema), []
    old = "draft-07" in schema.get("$schema", "")
    judge = (jsonschema.Draft7Validator if old else jsonschema.Draft202012Validator)(judged(schema))
    for case in group["tests"]:
        instance, valid = case["data"], case["valid"]
        valid = valid and (not narrower or judge.is_valid(instance))
        allowed = any(accepts(automaton, text) for text in texts(instance, names))
        if allowed == valid:
            found.append("allowed" if valid else "forbidden")
        elif allowed:
            found.append("wrong")
        elif keys(instance) - set(names) or case["description"] in LEFT_OUT:
            found.append("left out")
        else:
            found.append("wrong")
        if found[-1] == "wrong":
            print(json.dumps(schema), json.dumps(instance), valid)
    return found


def test_the_suite():
    """No case is wrong, and as many are decided as the docs say."""
    counts = collections.Counter()
    for file, groups in SUITE.items():
        for group in groups:
            schema = group["schema"]
            if file.startswith("draft7/") and isinstance(schema, dict):
                schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
            found = decided(schema, group, narrower=False)
            if found is None:
                found = decided(completed(schema), group, narrower=True)
            counts.update(found or ["refused"] * len(group["tests"]))
    assert counts == {"allowed": 234, "forbidden": 385, "left out": 44, "refused": 144}
