"""What mkdocs.yml cannot say: the pages that are made, those from outside of `docs/`, and the links between them."""

import re
from typing import Any

import site_navigation
import site_notebooks
import site_policies
import site_reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from site_links import PROJECT_PAGES, ROOT, with_site_links

from jkv.policies import POLICIES

MARK = re.compile(r"^<!-- .* -->$", flags=re.MULTILINE)  # a comment right above a table would be part of it


def on_config(config: MkDocsConfig) -> None:
    """Fills folders of the navigation."""
    config.nav = site_navigation.with_folders(config.nav)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages that are made, and those from outside of `docs/`."""

    def make(place: str, content: str | bytes) -> None:
        files.append(File.generated(config, place, content=content))

    for name in POLICIES:
        make(f"policies/{name}.md", site_policies.page_of(name))
    for name in site_reference.GROUPS:
        make(f"reference/{name}.md", site_reference.page_of(name))
    make("reference/command-line.md", site_reference.command_line_page())
    for notebook in site_notebooks.NOTEBOOKS:
        text, pictures = site_notebooks.page_of(notebook, config.extra["repository"])
        make(f"notebooks/{notebook.stem}.md", text)
        for name, picture in pictures.items():
            make(f"notebooks/{name}", picture)
    tables = [f"results/{path.name}" for kind in ("md", "png") for path in sorted((ROOT / "results").glob(f"*.{kind}"))]
    for place in (*PROJECT_PAGES, *tables):
        files.append(File.generated(config, place, abs_src_path=str(ROOT / place)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Rewrites the links of a page. Marks of generated parts are left out, and a table of results has a title."""
    place = page.file.src_uri
    if place == "README.md":
        page.meta["hide"] = ["navigation"]  # which has this page alone
    if place == "methods.md":
        markdown = site_policies.with_pages(markdown)
    markdown = MARK.sub("", markdown)
    if place.startswith("results/") and not markdown.startswith("# "):
        name = place.removeprefix("results/").removesuffix(".md")
        markdown = f"# {name}\n\nA table behind [the page of results](../docs/results.md).\n\n{markdown}"
    return with_site_links(markdown, place, config.extra["repository"])
