"""What mkdocs does with the pages: it draws the pictures, writes the reference, and mends links.

A page under docs/ reads well on GitHub as it is.  What differs on the site is made here, so that
nothing is written twice.
"""

from __future__ import annotations

import io
import pathlib
import re

from drawings import DRAWINGS
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference import PAGES, markdown_of

DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation lists the pages of the reference, which no file names."""
    for entry in config.nav or []:
        if isinstance(entry, dict) and "Reference" in entry:
            entry["Reference"] = [f"reference/{name}.md" for name in PAGES]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the drawings and the pages of the reference, none of which is a file of the checkout."""
    for name, draw in DRAWINGS.items():
        picture = io.BytesIO()
        draw().savefig(picture, format="svg", metadata={"Date": None})
        files.append(
            File.generated(config, f"drawings/{name}.svg", content=picture.getvalue().decode())
        )
    for name, module in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=markdown_of(module)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that leave docs/ lead to the repository, and tables inside of <details> are tables."""
    here = (DOCS / page.file.src_uri).parent

    def mended(link: re.Match[str]) -> str:
        path, _, anchor = link[2].partition("#")
        there = (here / path).resolve()
        if not path or there.is_relative_to(DOCS) or not there.exists():
            return link[0]
        kind = "tree" if there.is_dir() else "blob"
        anchor = anchor and f"#{anchor}"
        return f"{link[1]}({config.repo_url}/{kind}/main/{there.relative_to(ROOT)}{anchor})"

    markdown = re.sub(r"(\])\((?!https?:)([^)\s]+)\)", mended, markdown)
    return re.sub(r"<details>", '<details markdown="1">', markdown)
