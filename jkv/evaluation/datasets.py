"""Rows of a data set that lies on this machine: one file, or a folder as the Hugging Face hub or `save_to_disk` writes it.

Nothing is ever downloaded. Files are `.parquet`, `.arrow` (with pyarrow, of the extra `eval`), `.jsonl` and `.csv`. As on the
hub, a file's split stands in its name or in a folder's ("data/test-00000-of-00001.parquet", "test.jsonl"), and is "train"
where none does; the rest of its path is its subset ("main/test-...", "gpqa_diamond.csv").
"""

import csv
import fnmatch
import importlib.util
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jkv.checks import install, shown
from jkv.errors import refused
from jkv.reports import read_json_lines
from jkv.text_files import check_file, read_json, read_text

FORMATS = (".parquet", ".jsonl", ".csv")  # the first that a subset has, where the same rows lie there in several
SPLITS = {"train": "train", "test": "test", "validation": "validation", "valid": "validation", "val": "validation"} | {
    "dev": "validation",
}
SHARD = re.compile(r"(?:-|(?<!\d))\d+-of-\d+$|^\d+$")

MOST_ARROW = 1 << 36  # bytes of a file that pyarrow reads

Row = dict[str, Any]


def read_rows(source: Path, split: str | None = None, subset: str | None = None) -> list[Row]:
    """The rows of a file or a folder.

    `split` None takes the only one there is, else "test". `subset` may be a pattern ("aime2025-*").

    Raises:
      ValueError: nothing of that name on this machine, no such split or subset, several to choose from, or a file of another
        kind.
    """
    if source.is_file():
        if split or subset:
            raise refused(f"split and subset choose within a folder, and {source} is a file. Leave them out.", split="conflict")
        return read_file(source)
    if not source.is_dir():
        raise refused(
            f"{source} is no file or folder here, and jkv downloads no data sets. Download it, for example with: "
            f"hf download {source} --repo-type dataset --local-dir {source.name}; then give that folder.",
            source="not_found",
        )
    folder = snapshot_of(source)
    if is_saved(folder) or (folder / "dataset_dict.json").is_file():
        if subset:
            rule = f"{source} was written by save_to_disk and has no subsets; got {subset!r}. Leave subset out."
            raise refused(rule, subset="unknown_name")
        return read_saved(folder, split)
    files = [path for path in folder.rglob("*") if path.suffix in FORMATS and not is_hidden(path, folder)]
    if not files:
        rule = f"{source} must hold {', '.join(FORMATS)} files, or what save_to_disk writes; it holds none."
        raise refused(rule, source="not_found")
    places = {path: place_of(path.relative_to(folder)) for path in sorted(files)}
    if subset is not None:
        known = sorted({own for _, own in places.values() if own})
        places = {path: place for path, place in places.items() if fnmatch.fnmatchcase(place[1], subset)}
        if not places:
            raise refused(f"{source} has the subsets {known}; got {subset!r}.", subset="unknown_name")
    chosen = choose_split(source, {own for own, _ in places.values()}, split)
    subsets = sorted({own for each, own in places.values() if each == chosen})
    if subset is None and len(subsets) > 1:
        rule = f"{source} holds several sets: {', '.join(subsets)}. Choose with subset (--subset {subsets[0]})."
        raise refused(rule, subset="missing")
    return [row for name in subsets for path in of_one_format(places, chosen, name) for row in read_file(path)]


def snapshot_of(folder: Path) -> Path:
    """The folder itself, or, of a folder in the hub's cache, the revision that `main` names."""
    revision = folder / "refs" / "main"
    return folder / "snapshots" / read_text(revision, most=1_000).strip() if revision.is_file() else folder


def is_hidden(path: Path, folder: Path) -> bool:
    """Whether a file belongs to a tool's own folder, such as .cache or .git."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def place_of(path: Path) -> tuple[str, str]:
    """The split and the subset of a file, from its path inside the folder.

    >>> place_of(Path("main/test-00000-of-00001.parquet")), place_of(Path("gpqa_diamond.csv"))
    (('test', 'main'), ('train', 'gpqa_diamond'))
    """
    split, subset = "train", []
    for part in [*path.parts[:-1], SHARD.sub("", path.stem)]:
        words = re.split(r"[-_. ]", part)
        named = [word for word in words if word in SPLITS]
        split = SPLITS[named[-1]] if named else split
        if part and part not in ("data", "default") and len(named) < len(words):
            subset.append(part if not named else "-".join(word for word in words if word not in SPLITS))
    return split, "/".join(subset)


def of_one_format(places: dict[Path, tuple[str, str]], split: str, subset: str) -> list[Path]:
    """The files of a split and subset, in the order of their names."""
    files = [path for path, place in places.items() if place == (split, subset)]
    suffix = min((path.suffix for path in files), key=FORMATS.index)
    return [path for path in files if path.suffix == suffix]


def choose_split(source: Path, known: set[str], split: str | None) -> str:
    """The split that is asked for, or the obvious one."""
    if split is None:
        split = next(iter(known)) if len(known) == 1 else "test"
    if split not in known:
        rule = f"{source} has the splits {', '.join(sorted(known))}; got {split!r}. Choose with split (--split)."
        raise refused(rule, split="unknown_name")
    return split


def is_saved(folder: Path) -> bool:
    """Whether `Dataset.save_to_disk` wrote it."""
    return (folder / "state.json").is_file()


def read_saved(folder: Path, split: str | None) -> list[Row]:
    """Rows of what `save_to_disk` wrote: one split, or a folder of them."""
    if not is_saved(folder):
        known = read_json(folder / "dataset_dict.json", ("splits",))["splits"]
        if not isinstance(known, list) or not all(isinstance(name, str) for name in known):
            rule = f"{folder}/dataset_dict.json must list splits by name; got {shown(known)}. Save the data set again."
            raise refused(rule, source="invalid")
        chosen = choose_split(folder, set(known), split)
        if not is_saved(inner := inside(folder, chosen)):
            rule = f"{folder} must hold the split {chosen}, as save_to_disk wrote it; {inner} has no state.json."
            raise refused(rule, source="not_found")
        return read_saved(inner, None)
    if split is not None:
        rule = f"{folder} is a single split, as save_to_disk wrote it; got {split!r}. Leave split out."
        raise refused(rule, split="unknown_name")
    shards = read_json(folder / "state.json", ("_data_files",))["_data_files"]
    names = [shard.get("filename") if isinstance(shard, dict) else None for shard in shards if isinstance(shards, list)]
    if not names or not all(isinstance(name, str) for name in names):
        rule = f"{folder}/state.json must list files by filename; got {shown(shards)}. Save the data set again."
        raise refused(rule, source="invalid")
    return [row for name in names for row in read_file(inside(folder, str(name)))]


def inside(folder: Path, name: str) -> Path:
    """A path in a folder.

    Raises:
      ValueError: a name that leads outside.
    """
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise refused(f"{folder} may only name files inside it; got {shown(name)}. Save the data set again.", source="invalid")
    return path


def read_file(path: Path) -> list[Row]:
    """The rows of one file, by its ending."""
    if path.suffix in (".parquet", ".arrow"):
        return read_arrow(path)
    if path.suffix == ".csv":
        return read_csv(path)
    return read_json_lines(path)


def read_csv(path: Path) -> list[Row]:
    """The rows of a CSV file, whose first line names the fields."""
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path), newline="")))
    except csv.Error as error:
        raise refused(f"{path} must be a CSV file: {error}. Correct or convert it.", source="invalid") from None
    if rows and None in rows[0]:
        rule = f"{path} must name its fields in the first line; line 2 has more values than fields. Add the names."
        raise refused(rule, source="invalid")
    return rows


def read_arrow(path: Path) -> list[Row]:
    """The rows of a parquet file, or of the arrow stream that `save_to_disk` writes."""
    if importlib.util.find_spec("pyarrow") is None:
        raise refused(f"{path} is read with pyarrow, which is not installed. Run: {install('eval')}.", source="unsupported")
    import pyarrow as arrow
    from pyarrow import ipc, parquet

    check_file(path, MOST_ARROW)
    try:
        if path.suffix == ".parquet":
            return parquet.read_table(path, partitioning=None).to_pylist()
        with arrow.memory_map(str(path)) as source, ipc.open_stream(source) as reader:
            return reader.read_all().to_pylist()
    except arrow.ArrowException as error:
        raise refused(f"{path} must be a {path.suffix} file; {str(error).splitlines()[0]}", source="invalid") from None


def check_fields(source: Path, rows: Sequence[Row], fields: Sequence[str]) -> None:
    """Refuses rows without the fields that are read, naming the first row and those it has."""
    for number, row in enumerate(rows, 1):
        if missing := [field for field in fields if row.get(field) is None]:
            wanted = " and ".join(f'"{field}"' for field in fields)
            raise refused(
                f'Each line of {source} must be an object with {wanted}; line {number} is not: "{missing[0]}" is not among '
                f"its fields {', '.join(map(str, row))}. Name them with question and answer (--question, --answer), or take a "
                "preset.",
                source="invalid",
            )
