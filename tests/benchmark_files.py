"""Small files in the form of the published benchmarks; their texts are our own."""

import gzip
import json
import pathlib

CATEGORIES = ("coding", "math", "qa")
ADD = {
    "task_id": "HumanEval/0",
    "prompt": 'def add(a, b):\n    """Adds two numbers."""\n',
    "canonical_solution": "    return a + b\n",
    "test": "def check(f):\n    assert f(1, 2) == 3\n    assert f(2, 2) == 4\n",
    "entry_point": "add",
}
SUM = {
    "question": "Ann has 1,000 pears and buys 204 more. How many are there?",
    "answer": "She has 1000 + 204 = <<1000+204=1204>>1204 pears.\n#### 1,204",
}


def speed_bench(category, number):
    return {
        "question_id": f"{category}-{number}", "category": category, "sub_category": None,
        "turns": [f"def {category}_{number}(x):", "import os"][: 1 + number % 2],
        "source": "ours", "src_id": "0", "difficulty": None, "multiturn": bool(number % 2),
    }  # fmt: skip


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")


def write(folder) -> pathlib.Path:
    """Writes every benchmark into a folder of its name."""
    folder = pathlib.Path(folder)
    rows = [speed_bench(category, number) for category in CATEGORIES for number in range(2)]
    lines(folder / "speed-bench/data/qualitative.jsonl", rows)
    prepared = [
        {**{k: v for k, v in row.items() if k != "turns"},
         "messages": [{"role": "user", "content": turn} for turn in row["turns"]]}
        for row in rows[:2]
    ]  # fmt: skip
    lines(folder / "speed-bench/data/throughput_1k.jsonl", prepared)
    turns = [{"question_id": 81, "category": "writing", "turns": ["import os", "def f("]}]
    lines(folder / "mt-bench/question.jsonl", [{**turns[0], "reference": []}])
    lines(folder / "spec-bench/question.jsonl", [*turns, {**turns[0], "category": "rag"}])
    lines(folder / "gsm8k/test.jsonl", [SUM, {**SUM, "answer": "#### -7"}])
    (folder / "humaneval").mkdir()
    with gzip.open(folder / "humaneval/HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(ADD) + "\n")
    return folder
