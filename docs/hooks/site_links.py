"""Where a file of the repository is on the site, and links that work on GitHub made to work there.

A page keeps the links that GitHub needs, relative to its own place in the repository. Those to pages of the site are made
relative to the page's place on the site; all others lead to the repository on GitHub.
"""

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")  # of the root, which the site has too
LINK = re.compile(r"^```.*?^```|`[^`\n]+`|\]\(([^)\s]+)\)", flags=re.DOTALL | re.MULTILINE)  # code has no links


def place_of(path: str) -> str | None:
    """The place on the site of a file of the repository; None if the site does not have it.

    >>> place_of("docs/engine.md"), place_of("results/papers.md"), place_of("jkv/generate.py")
    ('engine.md', 'results/papers.md', None)
    """
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in PROJECT_PAGES or re.fullmatch(r"results/[^/]+\.(md|png)|notebooks/[^/]+\.png", path):
        return path
    return path.replace(".ipynb", ".md") if re.fullmatch(r"notebooks/[^/]+\.ipynb", path) else None


def home_of(place: str) -> str:
    """The place in the repository, from where a page of the site writes its links; made pages have one below `docs`.

    >>> home_of("engine.md"), home_of("results/papers.md")
    ('docs/engine.md', 'results/papers.md')
    """
    if place.startswith("notebooks/"):
        return place.replace(".md", ".ipynb")
    return place if place.startswith("results/") or place in PROJECT_PAGES else f"docs/{place}"


def with_site_links(text: str, place: str, repository: str) -> str:
    """A page of the site with its links rewritten.

    Raises:
      ValueError: a link to a file that does not exist.
    """

    def rewrite(found: re.Match[str]) -> str:
        target = found[1]
        if target is None or re.match(r"[a-z]+:|#", target):
            return found[0]
        path, mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(home_of(place)), path))
        on_site = place_of(path)
        if on_site is not None:
            return f"]({posixpath.relpath(on_site, posixpath.dirname(place) or '.')}{mark}{anchor})"
        if not (ROOT / path).exists():
            raise ValueError(f"{place} has a link to {target}, which does not exist. Correct it.")
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({repository}/{kind}/main/{path}{mark}{anchor})"

    return LINK.sub(rewrite, text)
