"""Links of docs/ that leave it, for `make docs`: what they lead to goes into the site, too.

The pages link to README.md, to code and to tests with relative paths, as the repository has them. The site holds copies
of these: a Markdown file as a page below project/, another file as plain text below source/, a folder of code as its
`__init__.py`. So the site is complete without knowing where the repository is on the web. MkDocs calls the two
functions that begin with `on_`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

TOP = Path(__file__).resolve().parents[1]
DOCS = TOP / "docs"
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
"""A relative link: before its path, the path, and its anchor."""


def led_to(page: Path, link: str) -> Path | None:
    """The file of the repository that a link on a page leads to, if there is one."""
    there = (page.parent / link).resolve()
    if there.is_dir():
        there = next((file for name in ("README.md", "__init__.py") if (file := there / name).is_file()), there)
    return there if there.is_file() and there.is_relative_to(TOP) else None


def name_on_site(file: Path) -> str:
    """Where a file of the repository is within the sources of the site."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    name = file.relative_to(TOP).as_posix()
    return f"project/{name}" if file.suffix == ".md" else f"source/{name}.txt"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds what pages lead to, and what is led to from there."""
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    while waiting:
        page = waiting.pop()
        for _, link, _ in LINK.findall(page.read_text(encoding="utf-8")):
            found = led_to(page, link)
            if found is None or (name := name_on_site(found)) in files.src_uris:
                continue
            files.append(File.generated(config, name, abs_src_path=str(found)))
            if found.suffix == ".md":
                waiting.append(found)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with links that hold on the site; one that leads nowhere stays, for MkDocs to name."""
    here = Path(page.file.abs_src_path or DOCS)

    def moved(link: re.Match[str]) -> str:
        before, path, after = link.groups()
        found = led_to(here, path)
        if found is None:
            return link.group()
        return before + posixpath.relpath(name_on_site(found), posixpath.dirname(page.file.src_uri)) + after

    return LINK.sub(moved, markdown)
