"""specjax train prompts: prompts for measurements, from the files that are held out of training.

Each file gives one prompt.  It ends after the function header nearest to the middle of the file,
and it starts at the beginning of a line, at least `--characters` earlier.  In a file without a
function header it ends after the line in the middle.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterator

from specjax.generation import read_lines
from specjax.options.command import parse
from specjax.options.fields import REQUIRED, count, option
from specjax.training.corpus import TextOptions, held_out_texts, read_documents, too_few

_HEADER = re.compile(r"^[ \t]*def .*:\n", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class PromptOptions(TextOptions):
    """The options of `train.prompts`."""

    group = "prompt"

    out: str = option(REQUIRED, "output file of JSON lines with `source` and `prompt`")
    characters: int = count(
        500, "least characters of a prompt, if the file has as many; a token has 3 to 4"
    )
    count: int = option(0, "most files, evenly spaced among those held out; 0: all", "[0, inf)")
    like: str | None = option(None, "a file of such prompts: use exactly the files that it names")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.like is not None and self.count:
            raise ValueError(
                f"--count {self.count} and --like {self.like} both choose files: leave one out"
            )


def cut(text: str, characters: int) -> str:
    """Returns the prompt of a file."""
    middle = len(text) / 2
    ends = [match.end() for match in _HEADER.finditer(text)]
    end = (
        min(ends, key=lambda end: abs(end - middle))
        if ends
        else text.find("\n", int(middle)) + 1 or len(text)
    )
    return text[text.rfind("\n", 0, max(end - characters, 0)) + 1 : end]


def prompts(options: PromptOptions) -> Iterator[dict[str, str]]:
    """Returns `source` and `prompt` of each file, in the order of the corpus."""
    documents = list(read_documents(options.source))
    chosen = held_out_texts([text for _, text in documents]) if documents else set()
    texts = {_name(path, options.data): text for path, text in documents if text in chosen}
    if options.like is not None:
        wanted = set()
        for number, line in read_lines(pathlib.Path(options.like)):
            try:
                wanted.add(str(json.loads(line)["source"]))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"--like {options.like}, line {number}: it must be an object like "
                    f'{{"source": "...", "prompt": "..."}} ({error!r})'
                ) from None
        if missing := sorted(wanted - texts.keys()):
            raise ValueError(
                f"--like {options.like} names {len(missing)} files that are not held out of "
                f"--data, {missing[0]} among them: other versions of a file have other hashes"
            )
        texts = {name: text for name, text in texts.items() if name in wanted}
    names = list(texts)
    if 0 < options.count < len(names):
        names = [names[index * len(names) // options.count] for index in range(options.count)]
    for name in names:
        yield {"source": name, "prompt": cut(texts[name], options.characters)}


def _name(path: pathlib.Path, folders: tuple[str, ...]) -> str:
    """Returns the path of a file from its folder of `--data` on, without "site-packages/"."""
    root = max(
        (root for root in map(pathlib.Path, folders) if path.is_relative_to(root)),
        key=lambda r: len(r.parts),
    )
    return path.relative_to(root.parent).as_posix().removeprefix("site-packages/")


def main(argv: list[str] | None = None) -> None:
    options = parse(PromptOptions, argv, __doc__)
    lines = list(prompts(options))
    if not lines:
        raise ValueError(too_few(options.source, 0))
    text = "".join(json.dumps(prompt) + "\n" for prompt in lines)
    pathlib.Path(options.out).write_text(text)
    print(f"wrote {options.out}: {len(lines)} prompts", flush=True)
