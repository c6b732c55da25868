"""The tables of families in `docs/models.md`, and of their files in `docs/files.md`, are what the tests say."""

import pytest

from jkv.checkpoints.families import FAMILIES
from tests.support.model_table import (
    COLUMNS,
    FILE_PAGE,
    FORMATS,
    GOLDEN,
    PAGE,
    Claim,
    cell,
    claim_of,
    collect,
    file_table_of,
    page_with,
    table_of,
)


@pytest.fixture(scope="module")
def found():
    return collect()


def test_the_page_says_what_is_tested(found):
    text = PAGE.read_text()
    assert page_with(text, table_of(found)) == text, "Run: python -m tests.support.model_table"
    text = FILE_PAGE.read_text()
    assert page_with(text, file_table_of(found)) == text, "Run: python -m tests.support.model_table"


def test_every_family_is_tested_in_every_format_but_one_in_gguf(found):
    for column in FORMATS[:4]:
        assert {one.family for one in found if one.column == column} == FAMILIES.keys()
    assert FAMILIES.keys() - {one.family for one in found if one.column == "GGUF"} == {"gemma4_text", "mistral"}
    for column in FORMATS:
        some = {one for one in found if one.column == column}
        assert some
        assert file_table_of(found - some) != file_table_of(found)


def test_every_family_is_tested_in_every_column_that_needs_no_compiler(found):
    checkpoints = {path.name for path in GOLDEN.iterdir() if path.is_dir()}
    for column in ("prompt", "64 decode steps", "batch and replay", "quantised pages"):
        assert {one.checkpoint for one in found if one.column == column} == checkpoints
    assert {one.family for one in found if one.column == "mesh"} == FAMILIES.keys()


def test_a_test_that_is_gone_changes_the_table(found):
    for column in COLUMNS:
        some = {one for one in found if (one.family, one.column) == ("llama", column)}
        assert some
        assert table_of(found - some) != table_of(found)


def test_a_cell_has_what_all_checkpoints_of_a_family_share():
    def of(*rows):
        return cell({Claim("llama", name, "mesh", value) for name, value in rows}, "llama", {"a", "b"}, "mesh")

    assert of() == "-"
    assert of(("a", ""), ("b", "")) == "yes"
    assert of(("a", "")) == "yes (1 of 2)"
    assert of(("a", "x"), ("a", "y"), ("b", "x")) == "x"
    assert of(("", "h200"), ("", "tpu-v5e")) == "h200, tpu-v5e"


def test_a_mark_of_no_column_is_refused():
    with pytest.raises(ValueError, match="A column must be one of"):
        claim_of({"golden": "llama_tied"}, "speed")
