"""python -m bench.spec_bench: the Spec-Bench protocol for any target, draft and proposer.

Questions are JSON lines with `question_id`, `category` and `turns`, and categories form six task
groups.  Every turn is answered greedily, once plainly and once with speculation; each of the two
sees its own earlier answers.  The report has tau, tokens/s and the speed-up over plain decoding for
each group.

Reference: Xia et al. 2024, arXiv 2401.07851.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

from tqdm import tqdm

import specjax
from bench.command import Report, run
from specjax.generation import Options
from specjax.options import fields
from specjax.options.command import parse

GROUPS = {
    **dict.fromkeys(
        ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
        "multi-turn conversation",
    ),
    "translation": "translation",
    "summarization": "summarization",
    "qa": "question answering",
    "math_reasoning": "mathematical reasoning",
    "rag": "retrieval-augmented generation",
}
"""Category -> task group."""


@dataclasses.dataclass(frozen=True)
class SpecBenchOptions(fields.Options):
    """The options of `python -m bench.spec_bench`."""

    questions: str = fields.option(fields.REQUIRED, "JSON lines with question_id, category, turns")
    target: str = fields.option(fields.REQUIRED, "folder or hub name")
    draft: str | None = fields.option(None, "folder or hub name; default: prompt lookup")
    num_drafts: int = fields.option(4, "draft tokens per step")
    dtype: str = fields.option("float32", "type of the weights")
    max_new_tokens: int = fields.option(1024, "limit per text, in tokens")
    chat: bool = fields.option(False, "use the tokenizer's chat template")
    json: str | None = fields.option(None, "write the figures of every answer to this file")


def main(argv: list[str] | None = None) -> None:
    arguments = parse(SpecBenchOptions, argv, __doc__, "python -m bench.spec_bench")
    questions = read_questions(arguments.questions)
    target = specjax.load(arguments.target, arguments.dtype)
    if arguments.draft:
        draft = specjax.load(arguments.draft, arguments.dtype)
        speculation: Options = {"draft": draft, "num_drafts": arguments.num_drafts}
    else:
        speculation = {"proposer": specjax.NGram(arguments.num_drafts)}
    answers = []
    for question in tqdm(questions, unit="question", disable=None, file=sys.stderr):
        plain = answer(target, question, arguments, {"proposer": "none"})
        fast = answer(target, question, arguments, speculation)
        group = GROUPS[question["category"]]
        answers.append(
            {"question_id": question["question_id"], "group": group, "plain": plain, "fast": fast}
        )
    print(table(answers))
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(answers))


def read_questions(path: str) -> list[Report]:
    """Raises ValueError for a line that lacks a field or has an unknown category."""
    questions = []
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            question = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(question, dict):
            raise ValueError(
                f"{path}, line {number} holds a {type(question).__name__}, not an object"
            )
        missing = {"question_id", "category", "turns"} - question.keys()
        if missing:
            raise ValueError(f"{path}, line {number} lacks {', '.join(sorted(missing))}")
        if question["category"] not in GROUPS:
            raise ValueError(
                f"{path}, line {number}: category {question['category']!r} is not one of "
                f"{', '.join(GROUPS)}"
            )
        turns = question["turns"]
        if (
            not isinstance(turns, list)
            or not turns
            or not all(isinstance(turn, str) and turn for turn in turns)
        ):
            raise ValueError(
                f"{path}, line {number}: turns is {turns!r}; it must be a list of texts"
            )
        questions.append(question)
    if not questions:
        raise ValueError(
            f"{path} holds no question: JSON lines with question_id, category and turns"
        )
    return questions


def answer(
    target: specjax.LanguageModel, question: Report, arguments: SpecBenchOptions, how: Options
) -> Report:
    """Answer all turns; the figures are those of a second run, because the first may compile."""
    messages: list[dict[str, str]] = []
    tokens, seconds, passes = 0, 0.0, 0
    for turn in question["turns"]:
        messages.append({"role": "user", "content": turn})
        text = "\n\n".join(message["content"] for message in messages) + "\n\n"
        prompt = None if arguments.chat else text
        options: Options = {
            **how,
            "max_new_tokens": arguments.max_new_tokens,
            "temperature": 0.0,
            "messages": messages if arguments.chat else None,
        }
        specjax.generate(target, prompt, **options)
        out = specjax.generate(target, prompt, **options)
        messages.append({"role": "assistant", "content": out.text[0]})
        tokens, seconds = tokens + out.stats.tokens, seconds + out.stats.seconds
        passes += out.stats.target_passes
    return {
        "tokens": tokens, "seconds": seconds, "passes": passes,
        "answers": [message["content"] for message in messages[1::2]],
    }  # fmt: skip


def table(answers: list[Report]) -> str:
    """One row for each group, and one for all questions."""
    lines = ["| group | questions | tau | tokens/s | speed-up | same answers |", "|" + "---|" * 6]
    groups = [*dict.fromkeys(a["group"] for a in answers), "all"]
    for group in groups:
        rows = [a for a in answers if group in ("all", a["group"])]

        def total(side: str, what: str, rows: list[Report] = rows) -> float:
            return sum(a[side][what] for a in rows)

        rate = total("fast", "tokens") / total("fast", "seconds")
        plain = total("plain", "tokens") / total("plain", "seconds")
        same = sum(a["plain"]["answers"] == a["fast"]["answers"] for a in rows)
        tau = total("fast", "tokens") / total("fast", "passes")
        lines.append(
            f"| {group} | {len(rows)} | {tau:.2f} | {rate:.0f} | {rate / plain:.2f} "
            f"| {same}/{len(rows)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
