"""What every report shares: tables of Markdown, and files of JSON lines whose errors name the line."""

import pytest

from jkv.reports import json_lines, markdown, markdown_line, read_json_lines


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
