"""What every report shares: tables of Markdown, files that are whole or not there, JSON lines whose errors name the line."""

import errno
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jkv import reports
from jkv.reports import append_text, json_lines, markdown, markdown_line, only_writer, read_json_lines, write_text

ROOT = Path(__file__).parents[1]


def test_a_table_printed_line_by_line_is_the_whole_table():
    rows = [(1, "x"), (2.5, "")]
    assert markdown(("a", "b"), rows).splitlines()[2:] == [markdown_line(row) for row in rows]


def test_records_are_read_as_they_were_written(tmp_path):
    path, records = tmp_path / "a.jsonl", [{"text": "one\u2028two\x85"}, {"text": ""}]
    path.write_text("\ufeff\n" + json_lines(records) + "\n\n", encoding="utf-8")
    assert read_json_lines(path, ("text",)) == records


@pytest.mark.parametrize(
    ("lines", "options", "words"),
    [
        ('{"a": 1}\n\n[]\n', {}, "must be a JSON object; line 3 is not.$"),
        ('{"a": 1}\n{"a": 1', {}, "line 2 is not"),
        ('\n{"b": 1}\n', {"fields": ("a", "b")}, 'a JSON object with "a" and "b"; line 2 is not.$'),
        ("3\n", {"what": "a sample", "fix": "Remove it."}, "must be a sample; line 1 is not. Remove it.$"),
    ],
)
def test_a_bad_line_is_named_by_its_number_in_the_file(lines, options, words, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines)
    with pytest.raises(ValueError, match=words):
        read_json_lines(path, **options)


def test_a_last_line_that_was_cut_is_dropped_only_where_asked(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}')
    assert read_json_lines(path, drops_cut_line=True) == [{"a": 1}]
    assert read_json_lines(path) == [{"a": 1}, {"a": 2}]


def test_a_file_is_written_with_the_usual_mode_and_keeps_its_own(tmp_path):
    path, plain = tmp_path / "a.md", tmp_path / "plain"
    plain.touch()
    write_text(path, "one\u2028é")
    assert path.read_text(encoding="utf-8") == "one\u2028é"
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o640)
    write_text(path, "two")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("two", 0o640)
    assert sorted(os.listdir(tmp_path)) == ["a.md", "plain"]


def test_a_link_stays_one_and_a_pipe_is_written_to(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text(tmp_path / "link", "one")
    write_text(tmp_path / "link", "two")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "two"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "three")
    assert os.read(reader, 100) == b"three"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("fails", ["write_all", "fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there_and_names_the_file(fails, tmp_path, monkeypatch):
    def fail(*args):
        if fails == "write_all":
            os.write(args[0], b"new, bu")
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "a.md"
    write_text(path, "old")
    monkeypatch.setattr(reports if fails == "write_all" else os, fails, fail)
    with pytest.raises(OSError, match=r"No space left on device: .*a\.md"):
        write_text(path, "new, but longer")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.md"]


@pytest.mark.parametrize("write", [write_text, append_text])
def test_a_folder_that_is_not_there_is_named(write, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none/a\.md'"):
        write(tmp_path / "none" / "a.md", "text")


HOLDS = """
import sys, time
from pathlib import Path
from jkv.reports import only_writer
with only_writer(Path(sys.argv[1])):
    print("holds", flush=True)
    time.sleep(60)
"""


def test_a_folder_has_one_writer_until_that_is_dead(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"holds\n"
    with pytest.raises(ValueError, match=f"must have one writer; process {process.pid} writes there"), only_writer(tmp_path):
        pass
    process.kill()
    process.communicate()
    with only_writer(tmp_path), pytest.raises(ValueError, match=f"process {os.getpid()} writes"), only_writer(tmp_path):
        pass
    with only_writer(tmp_path):
        pass
    assert not os.listdir(tmp_path)


RACES = """
import sys, time
from pathlib import Path
from jkv.reports import only_writer
folder, until = Path(sys.argv[1]), time.monotonic() + 3
held = 0
while time.monotonic() < until:
    try:
        with only_writer(folder):
            (folder / "alone").touch(exist_ok=False)
            (folder / "alone").unlink()
            held += 1
    except ValueError:
        pass
assert held > 10, held
"""


def test_writers_that_come_and_go_are_never_two_at_a_time(tmp_path):
    command = [sys.executable, "-c", RACES, str(tmp_path)]
    processes = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) for _ in range(3)]
    for process in processes:
        assert process.communicate()[1] == b""
        assert process.returncode == 0
    assert not os.listdir(tmp_path)


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    (tmp_path / "inner").mkdir()
    left = [tmp_path / ".a.json.0123.part", tmp_path / "inner" / ".b.jsonl.0123.part", tmp_path / ".new.md.0123.part"]
    for path in [*left, tmp_path / "c.part"]:
        path.touch()
        os.utime(path, (time.time() - 3600,) * 2)
    left[2].touch()  # somebody may be writing it
    with only_writer(tmp_path):
        pass
    assert [path.exists() for path in left] == [False, False, True]
    assert (tmp_path / "c.part").exists()
