"""Pieces of a text add up to it, for any tokens of any kind of tokenizer, pushed in chunks of any size."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jkv.reasoning.marks import completion_decoder
from jkv.reasoning.token_bytes import PartReader
from jkv.reasoning.token_text import StopFinder, TextStream, cut, decoder_of
from tests.support.small_tokenizers import byte_level, sentence_piece

SNOWMAN, GRIN = "☃".encode(), "😀".encode()
BYTE_LEVEL = byte_level(b" a", b"b ", SNOWMAN, SNOWMAN[:2], SNOWMAN[2:] + GRIN[:1], GRIN[1:] + GRIN[:2], "\ufffd".encode())
SENTENCE_PIECE = sentence_piece("\u2581a", "b", "\u2581", "\u2581\u2581", "☃", "\ufffd")
TOKENIZERS = {"bytes": BYTE_LEVEL, "sentence pieces": SENTENCE_PIECE}
WHOLE = {
    "bytes": {"☃": 258, "\ufffd": 262},
    "sentence pieces": {c: SENTENCE_PIECE.convert_tokens_to_ids(c.replace(" ", "\u2581")) for c in "b ☃\ufffd"},
}
SOME_BYTES = sorted({*SNOWMAN, *GRIN, *"é\ufffd".encode(), 0x41, 0x0A, 0x80, 0xBF, 0xC0, 0xE0, 0xED, 0xF4, 0xFF})
TOKENS = st.lists(st.sampled_from([*SOME_BYTES, *range(256, len(BYTE_LEVEL))]), max_size=60)
SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=4)


def chunks(tokens, sizes):
    """The tokens, in chunks of these sizes, again and again."""
    start = count = 0
    while start < len(tokens):
        yield tokens[start : start + sizes[count % len(sizes)]]
        start, count = start + sizes[count % len(sizes)], count + 1


def known(tokenizer, tokens):
    """The tokens that a tokenizer has, and one that pads its vocabulary."""
    return [token for token in tokens if token <= len(tokenizer)]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(TOKENS, SIZES)
@example([*b"ab", 0xEF, 0xBF, 0xBD], [16])
@example([0x41, 0xF0, 0x9F], [16])
@example([*SNOWMAN, 0xE2], [1])
@example([SNOWMAN[0], *[len(BYTE_LEVEL) - 1] * 40, *SNOWMAN[1:]], [1])
@example([256 + 4] * 50 + [0x41], [1])
def test_pieces_and_what_is_left_at_the_end_are_the_text(name, tokens, sizes):
    tokenizer = TOKENIZERS[name]
    tokens = known(tokenizer, tokens)
    for decode in (completion_decoder(tokenizer), decoder_of(tokenizer)):
        stream = TextStream(decode)
        parts = [stream.push(chunk) for chunk in chunks(tokens, sizes)]
        assert decode(tokens).startswith("".join(parts))
        assert "".join([*parts, stream.finish()]) == stream.text == decode(tokens)


def test_whole_characters_do_not_wait():
    stream = TextStream(completion_decoder(BYTE_LEVEL))
    assert [stream.push([byte]) for byte in "a☃b".encode()] == ["a", "", "", "☃", "b"]
    assert [stream.push([byte]) for byte in (0xF0, 0x9F, 0xF0, 0x41)] == ["", "", "\ufffd", "\ufffdA"]


def test_the_window_stays_small_where_no_token_ends_with_a_character():
    seen = []
    straddling = [SNOWMAN[2:] + SNOWMAN[:1], SNOWMAN[1:2]]

    def decode(tokens):
        seen.append(len(tokens))
        return b"".join(straddling[token] for token in tokens).decode(errors="replace")

    stream = TextStream(decode)
    for _ in range(2_000):
        stream.push([0, 1])
    stream.finish()
    assert max(seen[:-1]) < 64
    assert stream.text == decode([0, 1] * 2_000)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(TOKENS, st.lists(st.sampled_from(["☃", "a", "b", "ab", " a", "\n☃", "😀"]), min_size=1, max_size=3))
@example([262, 256], [" a"])  # sentence pieces have the space only after the special token
def test_a_text_stops_at_the_first_token_with_which_it_holds_a_stop_string(name, tokens, stops):
    tokenizer = TOKENIZERS[name]
    tokens, decodes = known(tokenizer, tokens), (decoder_of(tokenizer), completion_decoder(tokenizer))
    count = StopFinder(decodes[0], stops, decodes[1]).find(tokens)
    texts = [[decode(tokens[: i + 1]) for decode in decodes] for i in range(len(tokens))]  # with special tokens, and without
    holds = [any(cut(text, stops) != text for text in both) for both in texts]
    assert count == (holds.index(True) + 1 if any(holds) else None)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", " ", "☃", "😀", "é", "\ufffd", "\n"]), max_size=30), st.data())
def test_the_bytes_of_tokens_are_the_texts_and_their_places_count_its_characters(name, characters, data):
    tokenizer = TOKENIZERS[name]
    tokens = []
    for character in characters:  # whole, where there is such a token, or byte by byte
        token = WHOLE[name].get(character)
        is_whole = token is not None and (character == " " or data.draw(st.booleans()))
        tokens += [token] if is_whole else list(character.encode())
    tokens.append(len(tokenizer) - 1)
    decode = completion_decoder(tokenizer)
    text, parts = decode(tokens), PartReader(tokenizer, decode).read(tokens)
    assert b"".join(part.value for part in parts) == text.encode()
    assert [part.start for part in parts] == [
        len(b"".join(part.value for part in parts[:i]).decode(errors="ignore")) for i in range(len(parts))
    ]
    assert [part.name for part in parts[-1:]] == ["<|end|>"]


def test_a_part_of_a_character_is_named_by_its_bytes():
    reader = PartReader(BYTE_LEVEL, completion_decoder(BYTE_LEVEL), start=3)
    cut_in_two = reader.read([*GRIN[:2], *b"x"])
    assert [tuple(part) for part in cut_in_two] == [("bytes:\\xf0", b"\xf0", 3), ("bytes:\\x9f", b"\x9f", 3), ("x", b"x", 3)]


def test_the_space_before_a_word_is_its_tokens_where_the_text_has_it():
    words = [SENTENCE_PIECE.convert_tokens_to_ids("\u2581a")] * 2
    parts = PartReader(SENTENCE_PIECE, completion_decoder(SENTENCE_PIECE)).read(words)
    assert [part.value for part in parts] == [b"a", b" a"]
    assert SENTENCE_PIECE.decode(words) == "a a"
