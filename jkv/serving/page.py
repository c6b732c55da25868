"""The page at `/`, and the files that it is made of.

What a model writes is not trusted: by the Content-Security-Policy of these files, a browser runs the scripts among them alone,
and loads nothing from another host.
"""

import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from jkv.serving.errors import RefusalError

FOLDER = Path(__file__).with_name("static")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
FOREVER = "public, max-age=31536000, immutable"  # of libraries, whose names have their versions
ANEW = "no-cache"  # browsers ask whether the file they have is still the one


class File(NamedTuple):
    """A file of the page, and the headers that it is sent with."""

    content: bytes
    media_type: str
    headers: dict[str, str]


@functools.cache
def files() -> dict[str, File]:
    """The page's files by their names below `/static/`."""
    found = {path.relative_to(FOLDER).as_posix(): path for path in sorted(FOLDER.rglob("*")) if path.is_file()}
    return {name: read(name, path) for name, path in found.items()}


def read(name: str, path: Path) -> File:
    """A file with its tag, which changes with its content."""
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    kept = FOREVER if name.startswith("vendor/") else ANEW
    return File(content, TYPES.get(path.suffix, "text/plain"), HEADERS | {"etag": tag, "cache-control": kept})


async def page(request: Request) -> Response:
    """`/`: the page, to chat with the model or to have it complete texts; `/static/NAME`: a file of it."""
    name = request.path_params.get("name", "page.html")
    if name not in files():
        raise RefusalError(404, f"{request.url.path} is no file of the server's page.")
    content, media_type, headers = files()[name]
    if headers["etag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=media_type, headers=headers)
