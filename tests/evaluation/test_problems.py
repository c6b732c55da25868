"""Data sets on disk, in the forms that the hub and `save_to_disk` give them, and how their problems are put."""

import csv
import json
from typing import ClassVar

import numpy as np
import pytest

from jkv.evaluation.datasets import read_rows
from jkv.evaluation.problems import CHOOSE, PRESETS, REASON, preset_of, put, read_questions

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = [{"problem": f"What is {i}+{i}?", "solution": f"It is {2 * i}.", "answer": str(2 * i)} for i in range(6)]
GPQA = [
    {"Question": f"Which gas, {i}?", "Correct Answer": f"right {i}"}
    | {f"Incorrect Answer {j}": f"wrong {j}" for j in (1, 2, 3)}
    for i in range(12)
]


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.Table.from_pylist(rows), path)


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def save_to_disk(folder, rows):
    """The files that `Dataset.save_to_disk` writes, in two shards."""
    folder.mkdir(parents=True)
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    half = len(rows) // 2
    for name, part in zip(names, (rows[:half], rows[half:]), strict=True):
        table = arrow.Table.from_pylist(part)
        with arrow.OSFile(str(folder / name), "wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def answers(source, preset="math-500", **options):
    return [answer for _, answer in read_questions(source, PRESETS[preset], **options)]


EVERY = [row["answer"] for row in ROWS]


def test_a_snapshot_of_json_lines_is_read(tmp_path):
    write_lines(tmp_path / "test.jsonl", ROWS)
    (tmp_path / "README.md").write_text("---\n---\n")
    assert answers(tmp_path) == EVERY
    assert answers(tmp_path / "test.jsonl") == EVERY


def test_shards_of_a_split_follow_each_other_and_other_splits_stay_out(tmp_path):
    for i in (1, 0):
        write_parquet(tmp_path / "data" / f"test-0000{i}-of-00002.parquet", ROWS[3 * i : 3 * i + 3])
    write_parquet(tmp_path / "data" / "train-00000-of-00001.parquet", ROWS[:1])
    assert answers(tmp_path) == EVERY  # "test", as there are several
    assert answers(tmp_path, split="train") == EVERY[:1]
    with pytest.raises(ValueError, match="has the splits test, train; got 'validation'"):
        answers(tmp_path, split="validation")


def test_the_only_split_is_taken(tmp_path):
    write_parquet(tmp_path / "data" / "train-00000-of-00001.parquet", ROWS)
    assert answers(tmp_path, "aime") == EVERY


def test_a_set_of_several_asks_which(tmp_path):
    for name in ("main", "socratic"):
        write_parquet(tmp_path / name / "test-00000-of-00001.parquet", [{"question": name, "answer": f"#### 10{len(name)}"}])
    with pytest.raises(ValueError, match=r"several sets: main, socratic. Choose with subset \(--subset main\)"):
        answers(tmp_path, "gsm8k")
    assert answers(tmp_path, "gsm8k", subset="main") == ["104"]
    assert answers(tmp_path, "gsm8k", subset="*") == ["104", "108"]
    with pytest.raises(ValueError, match=r"has the subsets \['main', 'socratic'\]; got 'tertiary'"):
        answers(tmp_path, "gsm8k", subset="tertiary")


def test_a_set_that_lies_there_in_two_formats_is_read_once(tmp_path):
    write_lines(tmp_path / "test.jsonl", ROWS)
    write_parquet(tmp_path / "test.parquet", ROWS)
    assert answers(tmp_path) == EVERY


def test_what_a_tool_hides_is_not_read(tmp_path):
    write_lines(tmp_path / ".cache" / "test.jsonl", [{"x": 1}])
    write_lines(tmp_path / "test.jsonl", ROWS)
    assert answers(tmp_path) == EVERY


def test_the_cache_of_the_hub_is_read_at_its_revision(tmp_path):
    for name, rows in (("abc", ROWS), ("old", ROWS[:1])):
        write_lines(tmp_path / "snapshots" / name / "test.jsonl", rows)
    (tmp_path / "refs").mkdir()
    (tmp_path / "refs" / "main").write_text("abc")
    assert answers(tmp_path) == EVERY


def test_what_save_to_disk_writes_is_read(tmp_path):
    save_to_disk(tmp_path / "one", ROWS)
    assert answers(tmp_path / "one") == EVERY
    save_to_disk(tmp_path / "both" / "train", ROWS)
    save_to_disk(tmp_path / "both" / "test", ROWS[2:])
    (tmp_path / "both" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert answers(tmp_path / "both") == EVERY[2:]
    assert answers(tmp_path / "both", split="train") == EVERY


def test_save_to_disk_of_the_datasets_library_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "set")
    assert answers(tmp_path / "set") == EVERY
    datasets.Dataset.from_list(ROWS).shuffle(seed=0).save_to_disk(tmp_path / "mixed")
    assert sorted(answers(tmp_path / "mixed")) == sorted(EVERY)


def test_choices_are_put_in_an_order_of_their_own_that_the_seed_fixes(tmp_path):
    write_csv(tmp_path / "gpqa_diamond.csv", GPQA)
    preset = PRESETS["gpqa"]
    questions = read_questions(tmp_path, preset)
    assert questions == read_questions(tmp_path, preset, subset="gpqa_diamond")
    assert questions != read_questions(tmp_path, preset, shuffle_seed=1)
    assert {letter for _, letter in questions} == set("ABCD")
    for i, (text, letter) in enumerate(questions):
        listed = text.splitlines()[-4:]
        assert [line[:3] for line in listed] == ["A) ", "B) ", "C) ", "D) "]
        assert listed["ABCD".index(letter)] == f"{letter}) right {i}"
        assert sorted(line[3:] for line in listed) == sorted([f"right {i}", "wrong 1", "wrong 2", "wrong 3"])


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"Problem": "p", "Answer": 204}, "204"),
        ({"problem": "p", "answer": "025"}, "025"),
        ({"question": "p", "answer": 33.0}, "33"),
        ({"problem": "p", "answer": r"so \boxed{\frac{1}{2}}"}, r"\frac{1}{2}"),
    ],
)
def test_copies_of_aime_spell_their_fields_in_their_own_ways(row, answer, tmp_path):
    assert answers(write_lines(tmp_path / "a.jsonl", [row]), "aime") == [answer]


def test_a_set_of_ones_own_names_its_fields(tmp_path):
    file = write_lines(tmp_path / "mine.jsonl", [{"q": "1+1?", "a": "2"}])
    assert read_questions(file, preset_of(None, "q", "a")) == [("1+1?", "2")]
    with pytest.raises(ValueError, match=r'line 1 is not: "prompt" is not among its fields q, a. Name them with question'):
        read_questions(file, preset_of(None))
    with pytest.raises(ValueError, match="preset must be one of aime, math-500, gsm8k, gpqa; got 'mmlu'"):
        preset_of("mmlu")


def test_a_row_without_an_answer_is_told(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}])
    with pytest.raises(ValueError, match='line 2 is not: "answer"'):
        read_questions(file, preset_of(None))


def test_a_name_of_the_hub_is_refused_with_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from pathlib import Path

    with pytest.raises(ValueError, match="hf download some/set --repo-type dataset --local-dir set; then give that folder"):
        read_rows(Path("some/set"))


@pytest.mark.parametrize("name", ["test.parquet", "test.arrow"])
def test_a_broken_file_is_told_by_name(name, tmp_path):
    (tmp_path / name).write_bytes(b"no such thing")
    with pytest.raises(ValueError, match=f"{name} must be a"):
        read_rows(tmp_path / name)


def test_an_empty_set_or_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="it holds none"):
        read_rows(tmp_path)
    (tmp_path / "test.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="at least one problem; it is empty"):
        read_questions(tmp_path, PRESETS["math-500"])


def test_parquet_says_what_to_install(tmp_path, monkeypatch):
    write_parquet(tmp_path / "test.parquet", ROWS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "jkv-cache\[eval\]"'):
        read_rows(tmp_path)


class Chat:  # a tokenizer, as far as prompts go
    chat_template = (
        "{% for turn in messages %}<|{{ turn.role }}|>{{ turn.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ start }}{% endif %}"
    )
    special_tokens_map: ClassVar = {"start": "<|assistant|>"}

    def get_chat_template(self):
        return self.chat_template


def test_a_question_is_put_into_the_template_and_the_chat():
    assert put(None, [("{x}?", "1")], REASON)[0].prompt.startswith("{x}?\nPlease reason step by step")
    assert put(None, [("q", "1")], CHOOSE)[0].prompt.endswith("within \\boxed{}.")
    (problem,) = put(Chat(), [("q", "1")], "Say: {question}!", chat_template=True)
    assert (problem.prompt, problem.answer, problem.is_chat) == ("<|user|>Say: q!<|assistant|>", "1", True)
    with pytest.raises(ValueError, match="needs a tokenizer that has one"):
        put(None, [("q", "1")], chat_template=True)
    with pytest.raises(ValueError, match=r"where the question goes, as \{question\}; got 'Solve'"):
        put(None, [("q", "1")], "Solve")


def test_whole_numbers_of_a_column_with_gaps_stay_whole(tmp_path):
    write_parquet(tmp_path / "a.parquet", [{"problem": "p", "answer": np.float64(17)}])
    assert answers(tmp_path / "a.parquet") == ["17"]
