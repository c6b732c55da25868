"""JSON records, Markdown tables and JSON lines of every report, and the marks that place a table in a page.

A record describes its run (`about`): command, date, commit, machine and versions. Tables come from the JSON alone, so that no
figure on a page is typed by hand: `<!-- bench NAME -->` and `<!-- /bench NAME -->` mark where a page holds one. A file is
written whole or stays as it was, whenever its writer dies, and a folder may be kept for one writer.
"""

import codecs
import contextlib
import importlib.metadata
import io
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jkv.errors import refused

try:
    import fcntl
except ImportError:  # no POSIX system
    fcntl = None  # type: ignore[assignment]

from jkv.text_files import read_text

ROOT = Path(__file__).parent.parent
Report = Callable[[dict[str, Any]], None]  # receives figures as they are measured
LOCK, PART = ".jkv.lock", ".part"
PACKAGES = ("google-tunix", "jax", "jaxlib", "jkv", "kvpress", "numpy", "torch", "transformers")
MARKED = re.compile(  # the search for an end stops at another beginning, so that its time is linear
    r"(?P<begin><!-- bench (?P<name>[\w.-]+) -->\n)(?:(?!<!-- bench ).)*?(?P<end><!-- /bench (?P=name) -->)", flags=re.DOTALL
)
TAG = re.compile(r"<(?=[A-Za-z/!?])")  # what Markdown passes on as HTML
PIPE = re.compile(r"(?<!\\)\\*\|")  # with the backslashes before it, which would escape each other
HIDDEN_RANGES = (  # formats and fillers that show nothing, or turn the line; not the joiners, which make one sign of several
    *((code, code) for code in (0xAD, 0x34F, 0x61C, 0x115F, 0x1160, 0x180E, 0x200B, 0x200E, 0x200F, 0x3164, 0xFEFF, 0xFFA0)),
    *((0x2028, 0x202E), (0x2060, 0x206F), (0xFFF9, 0xFFFB), (0xE0000, 0xE007F)),
)
HIDDEN = frozenset(chr(code) for first, last in HIDDEN_RANGES for code in range(first, last + 1))


def about(command: str) -> dict[str, Any]:
    """A description of a run: command, date, commit, machine and versions."""
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "commit": commit(),
        "machine": describe_machine(),
        "versions": versions(),
    }


def describe_machine() -> dict[str, Any]:
    """The machine that figures are measured on, and its load over the last minute."""
    return {
        "cores": os.cpu_count(),
        "processor": processor(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": str(jax.devices()[0]),
        "device_kind": jax.devices()[0].device_kind,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def processor() -> str:
    """The processor's name where the system reports it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", info.read_text(), flags=re.MULTILINE) if info.exists() else None
    return found[1] if found else platform.processor()


def versions() -> dict[str, str]:
    """Versions of the packages that take part, where installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The checkout's commit, with "+" when files differ from it; None outside of a clone."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return None
    answers = [
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    ]
    return answers[0] + ("+" if answers[1] else "") if answers[0] else None


def digits(value: float, count: int = 4) -> float:
    """A figure to a few significant digits, however small.

    >>> digits(0.000123456), digits(123456.0)
    (0.0001235, 123500.0)
    """
    return float(f"{value:.{count}g}")


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table.

    >>> print(markdown(["a", "b"], [[1, "x"]]))
    | a | b |
    |---|---|
    | 1 | x |

    A cell is text, never markup or another cell: see `cell`.
    """
    return "\n".join([markdown_line(columns), "|" + "---|" * len(columns), *map(markdown_line, rows)])


def markdown_line(cells: Iterable[Any]) -> str:
    """One line of a table, for those that are printed as they grow."""
    return "| " + " | ".join(map(cell, cells)) + " |"


def cell(value: Any) -> str:
    r"""A value as one cell of a Markdown table: on one line, its pipes escaped, nothing in it a tag or hidden.

    >>> print(cell("a|b\n<script>alert(1)</script> < 2"))
    a\|b &lt;script>alert(1)&lt;/script> < 2
    """
    text = visible(" ".join(cut_text(str(value)).split("\n")))
    return PIPE.sub(r"\\|", TAG.sub("&lt;", text))


def cut_text(text: str, most: int = 1_000) -> str:
    """A text of at most so many characters, with a mark where it was cut.

    >>> cut_text("a" * 2_000, 5)
    'aaaa…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def visible(text: str) -> str:
    r"""A text with a mark for each character that would show nothing, or turn the line around; newlines stay.

    >>> visible("a\tb\x00\u202e")
    'a⇥b␀<U+202E>'
    """
    return text if text.isascii() and text.isprintable() else "".join(map(mark, text))


def mark(character: str) -> str:
    """A character, or its visible replacement."""
    if character == "\n" or (character not in HIDDEN and unicodedata.category(character) not in ("Cc", "Cs", "Cn")):
        return character
    code = ord(character)
    if character == "\t":
        return "\N{RIGHTWARDS ARROW TO BAR}"
    if code < 0x20:
        return chr(0x2400 + code)
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else f"<U+{code:04X}>"


def write_bytes(path: Path | str, content: bytes) -> None:
    """A file with this content: all of it, or what was there before, at whatever moment the process or the disk fails.

    Raises:
      OSError: it cannot be written, with its path.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a device or a pipe is written to, not replaced
        with open(path, "wb") as stream:
            stream.write(content)
        return
    target = os.path.realpath(path)  # a link stays one
    part = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{secrets.token_hex(4)}{PART}")
    try:
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                write_all(descriptor, content)
                if os.path.exists(target):
                    os.chmod(part, os.stat(target).st_mode & 0o777)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(part, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_all(descriptor: int, content: bytes) -> None:
    """Writes bytes, however many the system takes at a time."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def write_text(path: Path | str, text: str) -> None:
    """A file with this text, as `write_bytes` writes it."""
    write_bytes(path, text.encode())


def write_json(path: Path | str, record: Any) -> None:
    """A JSON file, as `write_bytes` writes it."""
    write_text(path, json.dumps(record, indent=1) + "\n")


def write_figure(path: Path | str, figure: Any) -> None:
    """A picture, in the format of the file's suffix, as `write_bytes` writes it."""
    stream = io.BytesIO()
    figure.savefig(stream, format=Path(path).suffix.lstrip(".") or None)
    write_bytes(path, stream.getvalue())


def append_text(path: Path, text: str) -> None:
    """Adds text to the end of a file. A disk that fills up meanwhile leaves a part of it.

    Raises:
      OSError: it cannot be written, with its path.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            write_all(descriptor, text.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keeps other processes from writing to a folder; removes what writers that were killed left half written.

    The lock is the system's, on the file `.jkv.lock`: it ends with the process, however that ends.

    Raises:
      ValueError: another process writes there.
    """
    descriptor = locked(folder)
    try:
        for part in [*folder.glob(f".*{PART}"), *folder.glob(f"*/.*{PART}")]:
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > 60:  # nobody takes as long to write a file
                    part.unlink()
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / LOCK).unlink()
        os.close(descriptor)


def locked(folder: Path) -> int:
    """The descriptor of a folder's lock file, locked."""
    path = folder / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is None:
                raise OSError("this system has no flock")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            rule = f"{folder} must have one writer; process {owner} writes there. Wait until it ends, or give another folder."
            raise refused(rule, path="conflict") from None
        except OSError as error:
            print(f"jkv: {folder} cannot be locked ({error}): start no second writer there", file=sys.stderr)
            return descriptor
        if is_at(path, descriptor):
            with contextlib.suppress(OSError):  # on a full disk, others are not told by whom
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()}\n".encode())
            return descriptor
        os.close(descriptor)  # its owner removed the file meanwhile: there may be another one


def is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def read_json_lines(
    path: Path, fields: Sequence[str] = (), what: str = "", fix: str = "", drops_cut_line: bool = False
) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; blank lines are skipped.

    Args:
      path: of the file.
      fields: that every object must have.
      what: each line must be, for the error; by default an object with these fields.
      fix: what to do about a bad line, for the error.
      drops_cut_line: whether a last line that was cut off, by an interrupt or a full disk, is dropped, with a line on stderr.

    Raises:
      ValueError: a line that is no object or lacks a field, by its number in the file.
    """
    # splitlines would also split inside strings, at U+2028
    lines = whole_lines(path) if drops_cut_line else read_text(path).split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # an integer of 5,000 digits is a plain ValueError
            record = None
        if not isinstance(record, dict) or not all(field in record for field in fields):
            named = " and ".join(f'"{field}"' for field in fields)
            wanted = what or ("a JSON object" + f" with {named}" * bool(fields))
            rule = f"Each line of {path} must be {wanted}; line {number} is not." + f" {fix}" * bool(fix)
            raise refused(rule, path="invalid")
        records.append(record)
    return records


def whole_lines(path: Path) -> list[str]:
    """The lines of a file but for a last one that has no end or is no JSON; a line on stderr names it.

    Raises:
      ValueError: a line before the last that is not UTF-8.
    """
    *lines, rest = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    while not rest and lines and not is_json(lines[-1]):
        rest = lines.pop()
    if rest:
        print(f"jkv: {path}: dropped line {len(lines) + 1}, the last, which was cut off", file=sys.stderr)
    try:
        return [line.decode() for line in lines]
    except UnicodeDecodeError as error:
        raise refused(f"{path} must be UTF-8 text; {error}.", path="invalid") from None


def is_json(line: bytes) -> bool:
    """Whether a line is JSON."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def json_lines(records: Iterable[Mapping[str, Any]]) -> str:
    """Records as JSON lines."""
    return "".join(json.dumps(record) + "\n" for record in records)


def footnote(record: Mapping[str, Any]) -> str:
    """The line below a table: command, date, machine and versions."""
    about = record["about"]
    machine, installed = about["machine"], about["versions"]
    taken = ", ".join(
        f"{name} {installed[name]}" for name in ("jax", "torch", "transformers", "kvpress", "google-tunix") if name in installed
    )
    busy = "" if machine["load"] is None else f", load {machine['load']} at the start"
    return f"`{about['command']}`, {about['date'][:10]}, {machine['cores']} cores of {machine['processor']}{busy}; {taken}."


def write(name: str, record: Mapping[str, Any], table: str, folder: Path, csv: str = "") -> None:
    """`NAME.json`, the table made from it, `NAME.md`, and its figures for other programs, `NAME.csv`, if there are any."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{name}.json", record)
    write_text(folder / f"{name}.md", table + "\n")
    if csv:
        write_text(folder / f"{name}.csv", csv)


def page_with(page: str, tables: Mapping[str, str]) -> str:
    r"""A page with each table between its marks.

    Raises:
      ValueError: the page marks a table that does not exist.

    >>> page_with("<!-- bench cost -->\nold\n<!-- /bench cost -->", {"cost": "new"})
    '<!-- bench cost -->\nnew\n<!-- /bench cost -->'
    """

    def replace(found: re.Match[str]) -> str:
        if found["name"] not in tables:
            raise ValueError(
                f"A page may show the tables of {', '.join(sorted(tables)) or 'no benchmark'}; it marks {found['name']!r}. "
                f"Run `jkv bench {found['name']} --out` on the folder of results, or take the marks out."
            )
        return found["begin"] + tables[found["name"]] + "\n" + found["end"]

    return MARKED.sub(replace, page)
