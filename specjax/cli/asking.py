"""Asks a model the questions of a benchmark, turn by turn, as its own answers require."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import specjax
from specjax._internal.checks import reworded
from specjax.cli.questions import SUBSETS, Question, read_questions
from specjax.generation import Options, conversations, encode
from specjax.options.fields import Options as Fields
from specjax.options.fields import option
from specjax.text import template_of

NAMES = ("speed-bench", "spec-bench", "humaneval", "gsm8k", "mt-bench")


@dataclasses.dataclass(frozen=True)
class DatasetOptions(Fields):
    """A published benchmark in the place of prompts."""

    group = "dataset"

    dataset: str | None = option(
        None, "a published benchmark, read from --dataset-path; nothing is downloaded. Default "
        "temperatures: 0, and the target's own if it samples", choices=NAMES,
    )  # fmt: skip
    dataset_path: str | None = option(
        None, "the folder with its published files, or one of the files", metavar="FOLDER"
    )
    subset: str = option(SUBSETS[0], "the part of speed-bench", choices=SUBSETS)
    category: tuple[str, ...] = option((), "only these categories", names=("--categories",))
    chat: bool | None = option(
        None, "use the target's chat template; default: if it has one, else plain text"
    )
    thinking: tuple[str, ...] = option(
        (), "measure with enable_thinking of the chat template on, off, or both",
        choices=("on", "off"),
    )  # fmt: skip
    accuracy: bool = option(
        False, "score the answers: exact match of gsm8k, tests of humaneval (with --run-code)"
    )
    run_code: bool = option(
        False, "with --accuracy on humaneval: run what the model wrote, in a child process with "
        "limits of time, memory and files. It can still read files and use the network: use a "
        "machine or container that has nothing to lose",
    )  # fmt: skip
    save_vllm: str | None = option(
        None, "write a line of JSON for each row with the keys of `vllm bench serve --save-result`",
        metavar="FILE",
    )  # fmt: skip
    save_aiperf: str | None = option(
        None, "write a folder for each row that `aiperf speed-bench-report` reads",
        metavar="FOLDER",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        scored = ("gsm8k", "humaneval")
        if self.dataset is None:
            for name in ("dataset_path", "category", "chat", "thinking", "accuracy", "run_code",
                         "save_vllm", "save_aiperf"):  # fmt: skip
                if getattr(self, name):
                    flag = "--" + name.replace("_", "-")
                    raise ValueError(f"{flag} is used with --dataset: add it, or leave {flag} out")
            if self.subset != SUBSETS[0]:
                raise ValueError("--subset is used with --dataset speed-bench")
            return
        if self.dataset_path is None:
            raise ValueError(
                f"--dataset {self.dataset} needs --dataset-path with the folder of its files: "
                "nothing is downloaded"
            )
        if self.subset != SUBSETS[0] and self.dataset != "speed-bench":
            raise ValueError(f"--subset {self.subset} is a part of speed-bench, not {self.dataset}")
        if self.accuracy and self.dataset not in scored:
            raise ValueError(
                f"--accuracy scores {' and '.join(scored)}; {self.dataset} has no answers to "
                "compare with: leave it out"
            )
        if self.accuracy and self.dataset == "humaneval" and not self.run_code:
            raise ValueError(
                "--accuracy on humaneval runs programs that the model wrote: add --run-code if "
                "this machine has nothing to lose, or leave --accuracy out"
            )
        if self.run_code and not (self.accuracy and self.dataset == "humaneval"):
            raise ValueError("--run-code is used with --dataset humaneval --accuracy")


@dataclasses.dataclass(frozen=True)
class Asking:
    """The questions of a run, and how they are put to the target."""

    target: specjax.LanguageModel
    questions: Sequence[Question]
    chat: bool
    max_new_tokens: int

    @classmethod
    def of(
        cls, options: DatasetOptions, target: specjax.LanguageModel, limit: int, new: int
    ) -> Asking:
        """Reads the questions, at most `limit` of each category; 0 is all.

        Raises:
          ValueError: questions that cannot be read, or options that the target's chat template
            does not know.
        """
        assert options.dataset is not None and options.dataset_path is not None
        found = read_questions(
            options.dataset, options.dataset_path, options.subset, options.category
        )
        if limit:
            taken: dict[str, list[Question]] = {}
            for question in found:
                taken.setdefault(question.category, []).append(question)
            found = [question for each in taken.values() for question in each[:limit]]
        template = template_of(target.files)
        chat = bool(template) if options.chat is None else options.chat
        if chat and not template:
            raise ValueError(f"--chat: {target.name} has no chat template; pass --no-chat")
        if options.thinking and (not chat or "enable_thinking" not in template):
            why = "is not used (--no-chat)" if not chat else "does not know enable_thinking"
            raise ValueError(
                f"--thinking {' '.join(options.thinking)}: the chat template of {target.name} "
                f"{why}: leave it out"
            )
        return cls(target, found, chat, new)

    def check(self, role: str, model: specjax.LanguageModel) -> None:
        """Raises ValueError if a model cannot read a conversation with all of its answers."""
        most = model.model.max_positions
        for question, asked in zip(self.questions, self._lengths, strict=True):
            turns = len(question.turns)
            total = asked + turns * self.max_new_tokens
            if total <= most:
                continue
            cures = ["leave the question out"]
            cures += [f"pass --max-new-tokens {(most - asked) // turns}"] * (asked + turns <= most)
            raise ValueError(
                f"question {question.name} has {asked} tokens, and --max-new-tokens "
                f"{self.max_new_tokens} in each of {turns} turns make {total}, but the {role} "
                f"{model.name!r} reads at most {most}: {', or '.join(cures)}"
            )

    @functools.cached_property
    def _lengths(self) -> list[int]:
        """The tokens of each conversation without its answers."""
        lengths = []
        for question in self.questions:
            with reworded(f"question {question.name}: "):
                ids = self._ids(question, [""] * (len(question.turns) - 1))
            lengths.append(len(ids))
        return lengths

    def _messages(self, question: Question, answers: Sequence[str]) -> list[dict[str, str]]:
        """Returns the conversation up to the turn after these answers."""
        messages = []
        if question.system is not None:
            messages.append({"role": "system", "content": question.system})
        for turn, said in enumerate(question.turns[: len(answers) + 1]):
            messages.append({"role": "user", "content": said})
            if turn < len(answers):
                messages.append({"role": "assistant", "content": answers[turn]})
        return messages

    def _text(self, question: Question, answers: Sequence[str]) -> str:
        if question.plain is not None:
            return question.plain
        said = [message["content"] for message in self._messages(question, answers)]
        return "\n\n".join(said) + "\n\n"

    def _ids(self, question: Question, answers: Sequence[str], **variables: Any) -> list[int]:
        if self.chat:
            messages = self._messages(question, answers)
            return conversations(self.target, None, messages, variables or None)[0]
        return encode(self.target, self._text(question, answers))[0]

    def ask(self, item: int, options: Options, thinking: str | None) -> list[specjax.Output]:
        """Returns the output of each turn of a question; the next turn sees the answers before."""
        question, outputs = self.questions[item], list[specjax.Output]()
        variables = {} if thinking is None else {"enable_thinking": thinking == "on"}
        for _ in question.turns:
            answers = [output.text[0] for output in outputs]
            ids = self._ids(question, answers, **variables)
            outputs.append(specjax.generate(self.target, [ids], **options))
        return outputs

    def prompts(
        self, item: int, outputs: Sequence[specjax.Output], thinking: str | None
    ) -> list[list[int]]:
        """Returns the token ids of the prompt of each turn, given the outputs of `ask`."""
        variables = {} if thinking is None else {"enable_thinking": thinking == "on"}
        question, answers = self.questions[item], [output.text[0] for output in outputs]
        return [
            self._ids(question, answers[:turn], **variables) for turn in range(len(question.turns))
        ]
