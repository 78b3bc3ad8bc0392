"""What mkdocs does with the pages: it draws the pictures, writes the reference, and mends links.

A page under docs/ reads well on GitHub as it is.  What differs on the site is made here, so that
nothing is written twice.
"""

from __future__ import annotations

import io
import os
import pathlib
import re

from drawings import DRAWINGS
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference import PAGES, markdown_of

DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent

OUTSIDE = {
    "contributing.md": "CONTRIBUTING.md",
    "checkpoints.md": "checkpoints/README.md",
    "changes.md": "CHANGELOG.md",
}
"""Pages that lie elsewhere in the checkout."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation lists the pages of the reference, which no file names."""
    for entry in config.nav or []:
        if isinstance(entry, dict) and "Reference" in entry:
            entry["Reference"] = [f"reference/{name}.md" for name in PAGES]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the drawings, the pages of the reference, and those that lie elsewhere."""
    for name, draw in DRAWINGS.items():
        picture = io.BytesIO()
        draw().savefig(picture, format="svg", metadata={"Date": None})
        files.append(
            File.generated(config, f"drawings/{name}.svg", content=picture.getvalue().decode())
        )
    for name, path in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text()))
    for name, module in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=markdown_of(module)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links lead to pages of the site, and tables inside of <details> are tables.

    A link to a file that is no page becomes the path of the file in a checkout, since the site does
    not know where the repository is served.
    """
    name = page.file.src_uri
    here = (DOCS / name).parent
    origin = (ROOT / OUTSIDE[name]).parent if name in OUTSIDE else here

    def mended(link: re.Match[str]) -> str:
        path, _, anchor = link[2].partition("#")
        there = (origin / path).resolve()
        if not path or not there.exists():  # of this page, or one that is made for the site
            return link[0]
        inside = str(there.relative_to(ROOT))
        of_site = {"README.md": "index.md"} | {other: made for made, other in OUTSIDE.items()}
        if inside in of_site:
            there = DOCS / of_site[inside]
        if not there.is_relative_to(DOCS):
            return f"{link[1]} (`{inside}`)" if link[1] != inside else f"`{inside}`"
        anchor = anchor and f"#{anchor}"
        return f"[{link[1]}]({os.path.relpath(there, here)}{anchor})"

    markdown = re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:)([^)\s]+)\)", mended, markdown)
    return re.sub(r"<details>", '<details markdown="1">', markdown)
