"""Texts of a model that try to break what reads them: bounded time and memory, nothing executed, no exception."""

import time
import tracemalloc

import pytest

import jkv
from jkv.evaluation.chains import read_answer
from jkv.evaluation.graders import GRADERS, normalise, read_box, read_choice
from jkv.evaluation.time_limit import TimeLimited
from jkv.reasoning.formulas import form_of
from jkv.reasoning.steering import label, num_checks
from jkv.reasoning.token_text import StopFinder, TextStream, cut, num_certain
from jkv.reasoning.word_tokenizer import Words
from jkv.reports import markdown, visible
from tests.support.hostile import TEXTS

SECONDS = 10.0  # on a busy machine; what is quadratic takes hours


def read_as_words(text):
    words = Words([text])
    assert words.decode(words.encode(text)) == text


READERS = {
    "formulas": form_of,
    "box": read_box,
    "choice": read_choice,
    "answer": read_answer,
    "normalise": normalise,
    "checks": num_checks,
    "label": label,
    "words": read_as_words,
    "stop strings": lambda text: (cut(text, ["</think>", "zzz"]), num_certain(text, ["x" * 1000, " " * 999 + "!"])),
    "table": lambda text: markdown(["a", "b"], [[text, text]]),
    "visible": visible,
    "equal text": lambda text: GRADERS["boxed"](text, "1"),
    "choice of text": lambda text: GRADERS["choice"](text, "A"),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_ends_soon_with_any_text(reader, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = time.process_time()
    READERS[reader](TEXTS[name])
    assert time.process_time() - start < SECONDS
    assert not list(tmp_path.iterdir())  # nothing was executed


@pytest.fixture(scope="module")
def math_grader(tmp_path_factory):
    """The folder in which the process of the math grader runs; one process reads all texts, as in an evaluation."""
    pytest.importorskip("math_verify")
    from jkv.evaluation import graders

    folder, worker = tmp_path_factory.mktemp("grader"), TimeLimited(graders.MATH_VERIFY.script, seconds=3.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(graders, "MATH_VERIFY", worker)
        yield folder
        worker.close()


@pytest.mark.parametrize("name", TEXTS)
def test_the_math_grader_keeps_its_time_limit_with_any_text(name, math_grader):
    from jkv.evaluation import graders

    assert graders.equal_math("x", "y") is False  # starts the process, where the last text ended it
    start = time.perf_counter()
    graders.equal_math(TEXTS[name], "7")
    graders.equal_math("7", TEXTS[name][:390])
    assert not GRADERS["math"](rf"\boxed{{{TEXTS[name][:350]}", "7")
    assert time.perf_counter() - start < 12.0
    assert GRADERS["math"](r"\boxed{\frac{14}{2}}", "7")  # and works afterwards
    assert not list(math_grader.iterdir())


@pytest.mark.parametrize("name", ["a line of a megabyte", "blank lines", "words", "surrogates", "null bytes", "combining"])
def test_an_analysis_ends_with_any_text(name):
    start = time.process_time()
    jkv.analyze([TEXTS[name] or "x", "a b c\n\na b c"])
    assert time.process_time() - start < 30


TOKENS = {
    "bytes of no character": [0x80] * 30_000,
    "beginnings of characters": [0xF0] * 30_000,
    "halves": [0xE2, 0x98] * 15_000,
    "no text": [0] * 30_000,
    "text": [65] * 30_000,
}


@pytest.mark.parametrize("name", TOKENS)
def test_the_work_for_a_token_is_bounded_whatever_the_tokens_are(name):
    def decode(tokens):
        seen.append(len(tokens))
        return bytes(token for token in tokens if token).decode(errors="replace")

    seen: list[int] = []
    tracemalloc.start()
    stream = TextStream(decode)
    for token in TOKENS[name]:
        stream.push([token])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(seen) < 64
    assert peak < 8e6
    assert stream.num_tokens == 30_000
    assert len(decode(TOKENS[name])) - len(stream.text) < 20


def test_a_stop_string_is_found_after_bytes_of_no_character():
    finder = StopFinder(lambda tokens: bytes(tokens).decode(errors="replace"), ["end", "\ufffdx"])
    assert finder.find([0x80] * 100) is None
    assert finder.find(list(b"the end")) == 7


def test_what_is_streamed_begins_the_whole_text_for_any_bytes():
    import random

    draw = random.Random(0)
    parts = ["é".encode(), "☃".encode(), "😀".encode(), b"a", b"\x80", b"\xf0", b"\xf0\x9f", b"\xff", b"\xe2\x98"]
    for _ in range(2_000):
        weights = [draw.choice([1, 5, 30]) for _ in parts]
        tokens = list(b"".join(draw.choices(parts, weights, k=draw.randint(1, 60))))
        stream, start, text = TextStream(lambda tokens: bytes(tokens).decode(errors="replace")), 0, ""
        while start < len(tokens):
            size = draw.choice([1, 1, 2, 5, 17])
            text += stream.push(tokens[start : start + size])
            start += size
        assert text == stream.text
        assert bytes(tokens).decode(errors="replace").startswith(text)
