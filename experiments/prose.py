"""English prose that most machines have: manual pages, and the descriptions of Python packages."""

from __future__ import annotations

import gzip
import json
import pathlib
import re
import sysconfig
from collections.abc import Iterator

from specjax.training.record import write

_MANUALS = pathlib.Path("/usr/share/man")
_PAGES, _LEAST, _MOST = 3000, 1500, 40_000
_KEPT = re.compile(r"^[.'](?:SH|SS|B|I|BR|BI|IR|IB|RB|RI|SM|IP)\s+(.*)$")
_FONTS = re.compile(r"\\f(?:\[[^]]*\]|\(..|.)|\\s[-+]?\d|\\[&|^/,%c]")
_MARKS = {
    r"\-": "-",
    r"\(aq": "'",
    r"\(dq": '"',
    r"\e": "\\",
    r"\(bu": "-",
    r"\(em": "-",
    r"\ ": " ",
}
_OTHERS = re.compile(r"\\(?:\[[^]]*\]|\(..|\*(?:\[[^]]*\]|\(..|.)|.)")


def collect(path: pathlib.Path, least: int = 1_000_000) -> pathlib.Path:
    """Write JSON lines with a text each, if they are not there yet.

    Raises:
      ValueError: this machine has fewer than `least` characters of such texts.
    """
    if path.exists():
        return path
    texts = [text for text in (*_manuals(), *_descriptions()) if len(text) >= _LEAST]
    if sum(map(len, texts)) < least:
        raise ValueError(
            f"this machine has {sum(map(len, texts))} characters of manual pages and descriptions, "
            f"and {least} are needed: name folders of English texts with --prose"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, "".join(json.dumps({"text": text[:_MOST]}) + "\n" for text in texts))
    return path


def plain(source: str) -> str:
    """The words of a manual page, without its macros."""
    lines = []
    for line in source.splitlines():
        if line.startswith((".", "'")):
            found = _KEPT.match(line)
            if found is None:
                continue
            line = found[1].replace('"', "")
        line = _FONTS.sub("", line)
        for mark, word in _MARKS.items():
            line = line.replace(mark, word)
        lines.append(_OTHERS.sub("", line))
    return "\n".join(lines).strip() + "\n"


def _manuals() -> Iterator[str]:
    files = sorted(_MANUALS.glob("man[1-8]/*.gz"))
    for file in files[:: max(1, len(files) // _PAGES)]:
        try:
            yield plain(gzip.decompress(file.read_bytes()).decode())
        except (OSError, UnicodeDecodeError):
            continue  # a broken link, or another encoding


def _descriptions() -> Iterator[str]:
    packages = pathlib.Path(sysconfig.get_paths()["purelib"])
    for file in sorted(packages.glob("*.dist-info/METADATA")):
        # The description follows the first blank line.
        yield file.read_text(errors="replace").partition("\n\n")[2]
