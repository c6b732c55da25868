"""Text that grows token by token: the same as decoding all at once, and stop strings found where they are complete."""

import pytest

from jkv.reasoning.token_text import StopFinder, TextStream, cut, num_certain

BYTES = list("héllo wörld — naïve ☃ end".encode())


def decode(tokens):
    """Every token is a byte, so most characters take several."""
    return bytes(tokens).decode("utf-8", errors="replace")


def spaced(tokens):
    """A tokenizer that, as SentencePiece does, drops the space before the first word."""
    return "".join(" " + "abc"[token] for token in tokens).removeprefix(" ")


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_pieces_add_up_to_the_whole(size):
    stream = TextStream(decode)
    for start in range(0, len(BYTES), size):
        stream.push(BYTES[start : start + size])
        assert "\ufffd" not in stream.text
    assert stream.text == decode(BYTES)


def test_a_space_that_depends_on_the_tokens_before_is_kept():
    stream = TextStream(spaced)
    for token in (0, 1, 2):
        stream.push([token])
    assert stream.text == "a b c"


def test_the_work_for_a_token_does_not_grow():
    seen = []
    stream = TextStream(lambda tokens: seen.append(len(tokens)) or decode(tokens))
    for token in b"x" * 1000:
        stream.push([token])
    assert max(seen) <= 2


@pytest.mark.parametrize("size", [1, 2, 5, 30])
def test_a_stop_string_is_found_across_pieces(size):
    finder = StopFinder(decode, ["naïve", "never"])
    kept = 0
    for start in range(0, len(BYTES), size):
        count = finder.find(BYTES[start : start + size])
        if count is not None:
            kept += count
            break
        kept += size
    assert decode(BYTES[:kept]).endswith("naïve")


def test_without_a_stop_string_everything_goes_on():
    assert StopFinder(decode, ["snow"]).find(BYTES) is None


def test_text_that_may_become_a_stop_string_waits():
    assert num_certain("done</thi", ["</think>", "zz"]) == 4
    assert num_certain("done", ["</think>"]) == 4
    assert num_certain("a<b<", ["<b<c"]) == 1
    assert num_certain("any", []) == 3


def test_text_is_cut_before_the_first_of_several():
    assert cut("a;b,c", [",", ";"]) == "a"
    assert cut("abc", [","]) == "abc"
