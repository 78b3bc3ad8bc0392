"""The prompts of a command."""

from __future__ import annotations

import dataclasses
import pathlib

from specjax.generation import read_file
from specjax.options.fields import Options, option


@dataclasses.dataclass(frozen=True)
class PromptOptions(Options):
    """The prompts, on the command line or in a file."""

    group = "prompt"

    prompt: tuple[str, ...] = option((), "one or several prompts", positional=True)
    prompt_file: str | None = option(
        None, "a text file (one prompt), or JSON lines with a field `prompt`"
    )

    def prompts(self, default: list[str] | None = None) -> list[str]:
        """Returns the prompts, or `default` if there is one and none were given.

        Raises:
          ValueError, OSError: both or neither were given, or as `specjax.generation.read_file`.
        """
        if default is not None and not self.prompt and not self.prompt_file:
            return default
        if bool(self.prompt) == bool(self.prompt_file):
            raise ValueError(
                'pass either a prompt, such as "def fibonacci(n):", or --prompt-file, not both'
            )
        if not self.prompt_file:
            return list(self.prompt)
        prompts = read_file(pathlib.Path(self.prompt_file))
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) < len(prompts):
            raise ValueError(
                f"{self.prompt_file} holds conversations; this command takes texts: lines like "
                '{"prompt": "..."}'
            )
        return texts
