"""The site of docs/: it builds without a warning, holds what its pages lead to, and loads nothing from elsewhere."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Tags that make a browser load something, and where they say what."""


class Addresses(HTMLParser):
    """What a page loads, and what it links to."""

    def __init__(self, text):
        super().__init__()
        self.loaded, self.linked = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if found.get(LOADS.get(tag)) and found.get("rel") != "canonical":
            self.loaded.append(found[LOADS[tag]])
        if tag == "a" and found.get("href"):
            self.linked.append(found["href"])


def built(folder, *more):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *more]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = built(folder)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def test_every_page_is_on_the_site_and_every_link_holds(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    there = {path.relative_to(site) for path in site.rglob("*.html")}
    assert {path.parent / "index.html" if path.stem == "README" else path for path in pages} <= there
    missing = set()
    for path in site.rglob("*.html"):
        for link in Addresses(path.read_text()).linked:
            address = urlsplit(link)
            if not address.scheme and address.path and path.name != "404.html":
                target = (path.parent / unquote(address.path)).resolve()
                missing |= set() if target.exists() else {(path.name, link)}
    assert missing == set()


def test_code_that_a_page_links_to_is_on_the_site(site):
    assert 'href="../source/src/stretto/runtime/loop.py.txt"' in (site / "concepts" / "the-loop.html").read_text()
    copy = site / "source" / "src" / "stretto" / "runtime" / "loop.py.txt"
    assert copy.read_bytes() == (ROOT / "src" / "stretto" / "runtime" / "loop.py").read_bytes()


def test_the_site_loads_nothing_from_elsewhere(site):
    for path in site.rglob("*.html"):
        assert [load for load in Addresses(path.read_text()).loaded if urlsplit(load).scheme not in ("", "data")] == []
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?https?:", path.read_text()), path


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "README.md").write_text("# One page\n\n[away](../nowhere.md)\n")
    own = f"INHERIT: {ROOT}/mkdocs.yml\nhooks: [{ROOT}/scripts/site_links.py]\nnav: [README.md]\n"
    (tmp_path / "mkdocs.yml").write_text(own)
    done = built(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert done.returncode != 0 and "nowhere.md" in done.stderr
