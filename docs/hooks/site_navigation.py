"""The order of pages: `nav` in mkdocs.yml, where `policies/*` and the like stand for the pages of a folder."""

from typing import Any

import site_notebooks
import site_reference
from site_links import ROOT

from jkv.policies import POLICIES


def folders() -> dict[str, list[str]]:
    """The pages that `FOLDER/*` in `nav` includes, in order."""
    return {
        "policies/*": [f"policies/{name}.md" for name in POLICIES],
        "results/*": [f"results/{table.name}" for table in sorted((ROOT / "results").glob("*.md"))],
        "notebooks/*": [f"notebooks/{notebook.stem}.md" for notebook in site_notebooks.NOTEBOOKS],
        "reference/*": [*(f"reference/{name}.md" for name in site_reference.GROUPS), "reference/command-line.md"],
    }


def with_folders(nav: Any) -> Any:
    """A list of `nav` with the pages of folders."""
    pages = folders()
    found: list[Any] = []
    for item in nav:
        if isinstance(item, dict):
            found.append({title: with_folders(inner) if isinstance(inner, list) else inner for title, inner in item.items()})
        else:
            found += pages.get(item, [item])
    return found
