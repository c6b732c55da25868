"""The measures of redundancy against recounts in plain Python, and what they must be for texts that are known."""

import math
import re
from collections import Counter

import numpy as np
import pytest

from jkv.analysis.redundancy import MEASURES, PREFIXES, make_reader
from jkv.reasoning.formulas import form_of
from jkv.reasoning.word_tokenizer import Words
from jkv.testing import TinyTokenizer

BREAKS = ("\n\n", ".\n\n")
PROSE = """<think>
So d=b*c, then.

Let me verify: d = b * c. Is it?

Alternatively, take another way; d=b+c.

So d=b*c, then.

Wait. So d=b*c, then!

Once again: d=b*c

</think>

\\boxed{d=1}"""


def read(text, tokenizer=None, encoder="tokens"):
    return make_reader([text], tokenizer, encoder).read(text)


def cosine(a, b):
    a, b = Counter(a), Counter(b)
    return sum(a[x] * b[x] for x in a) / math.sqrt(sum(x * x for x in a.values()) * sum(x * x for x in b.values()))


def cut(pieces, ends):
    """Runs of pieces, each with the one that ends it; without those that hold nothing but white space and marks."""
    runs, run = [], []
    for piece in pieces:
        run.append(piece)
        if piece in ends:
            runs.append(run)
            run = []
    says = [[piece for piece in one if piece.strip() and "think>" not in piece] for one in (*runs, run)]
    return [(one, said) for one, said in zip((*runs, run), says, strict=True) if said]


def recount(pieces, counted, sentence_ends):
    """All figures of a text that is given as its tokens' texts, from the papers' words."""
    out = {"tokens": len(counted)}
    for n in (1, 2, 3):
        found = Counter(tuple(counted[i : i + n]) for i in range(len(counted) - n + 1))
        out[f"frequency_{n}"] = sum(found.values()) / len(found) if found else None
    out["entropy_3"] = -sum(x / found.total() * math.log2(x / found.total()) for x in found.values()) if found else None

    steps = cut(pieces, {*BREAKS, "<think>", "</think>"})
    like = [[cosine(said, other) for _, other in steps[:i]] for i, (_, said) in enumerate(steps)]
    for threshold in (0.8, 0.9):
        out[f"similar_steps_{threshold}"] = np.mean([max(one, default=0) > threshold for one in like]) if steps else None
    passed, forms = [], [form_of("".join(piece for piece in run if "think>" not in piece))[0] for run, _ in steps]
    for i in range(len(steps)):
        sizes = [sum(len(piece.encode()) for piece in other) for _, other in steps[: i + 1]]
        scores = [x * min(sizes[j], sizes[i]) / max(sizes[j], sizes[i]) for j, x in enumerate(like[i])]
        least = 0.9 - 0.2 * np.mean(scores) if scores else 0.9
        passed.append(any(score > least and forms[j] == forms[i] for j, score in enumerate(scores)))
    out["shareable_steps"] = np.mean(passed) if steps else None

    sentences = [said for _, said in cut(pieces, sentence_ends)]
    every = [[cosine(a, b) for j, b in enumerate(sentences) if j != i] for i, a in enumerate(sentences)]
    for n in (1, 2, 4):
        out[f"repeated_sentences_{n}"] = np.mean([sum(x > 0.75 for x in one) > n for one in every]) if every else None
    out["similar_sentences"] = np.mean([any(x >= 0.95 for x in one) for one in every]) if every else None
    return out | {"steps": len(steps), "sentences": len(sentences)}


def check(figures, expected):
    assert {name: figures[name] for name in expected if name in MEASURES} == pytest.approx(
        {name: value for name, value in expected.items() if name in MEASURES}
    )


def test_every_figure_of_random_texts_is_what_a_recount_gives():
    rng, tokenizer = np.random.default_rng(0), TinyTokenizer()
    seen = []
    for _ in range(30):
        tokens = rng.choice(
            [0, 1, 2, 3, 4, 5, 6, 7], size=rng.integers(0, 100), p=[0.02, 0.02, 0.16, 0.1, 0.4, 0.15, 0.1, 0.05]
        )
        text = tokenizer.decode(tokens)
        pieces = [tokenizer.pieces[token] for token in tokens]
        expected = recount(pieces, pieces, set(BREAKS))
        check(read(text, tokenizer), expected)
        seen.append(expected)
    for name in seen[0]:
        assert len({one[name] for one in seen}) > 3, name  # no figure that would be right by always being the same


def test_words_are_counted_without_white_space_and_marks():
    pieces = re.findall(r"</?think>|\n\n|\n|[^\S\n]+|\w+|[^\w\s]", PROSE)
    assert "".join(pieces) == PROSE
    figures = read(PROSE)
    check(figures, recount(pieces, [piece for piece in pieces if piece.strip() and "think" not in piece], {"\n\n", "\n"}))
    assert figures["shareable_steps"] == 1 / 7
    assert figures["steps"] == figures["sentences"] == 7


def test_thoughts_are_labelled_by_seals_phrases_and_by_skip_kvs_words():
    figures = read(PROSE)  # the first paragraph opens no thought, the answer is none
    assert figures["thoughts"] == 5
    assert figures["checks"] == 2 / 5  # let me verify, Wait
    assert figures["switches"] == 1 / 5
    assert figures["non_execution"] == 3 / 5
    assert figures["keyword_thoughts"] == 3 / 5  # Alternatively, Wait, again


@pytest.mark.parametrize(
    ("text", "count"), [(PROSE[len("<think>") :], 5), ("a\n\nb\n\nc\n\nd", 2), ("a\n\n</think>\n\nb\n\n", 0)]
)
def test_a_text_that_never_opens_its_thinking_begins_in_it(text, count):
    assert read(text)["thoughts"] == count


def test_texts_without_repetition_have_the_entropy_of_their_length_and_frequency_one():
    text = " ".join(f"w{i}" for i in range(300))
    figures = read(text)
    assert figures["entropy_3"] == pytest.approx(math.log2(298))
    assert figures["entropy_3_first_256"] == pytest.approx(math.log2(254))
    assert figures["entropy_3_first_512"] is None
    assert figures["frequency_1"] == figures["frequency_2"] == 1
    assert figures["similar_steps_0.8"] == figures["repeated_sentences_1"] == 0


def test_what_is_said_again_raises_every_share():
    once = "".join(f"a{i} is b{i} and c{i}\n\n" for i in range(10))
    first, twice, thrice = (read(once * times) for times in (1, 2, 3))
    assert first["similar_steps_0.9"] == 0
    assert twice["similar_steps_0.9"] == twice["shareable_steps"] == 0.5
    assert thrice["similar_steps_0.9"] == pytest.approx(2 / 3)
    assert [one["repeated_sentences_1"] for one in (first, twice, thrice)] == [0, 0, 1]  # more than one other
    assert [one["similar_sentences"] for one in (first, twice, thrice)] == [0, 1, 1]
    assert twice["frequency_1"] == pytest.approx(2 * first["frequency_1"])
    assert first["entropy_3"] < thrice["entropy_3"] < first["entropy_3"] + 0.2  # longer, but hardly anything new


def test_steps_of_other_formulas_are_similar_but_not_shareable():
    step = "so from what was given above it follows that we have d=b{}c which is to be kept in mind\n\n"
    other, same = (read(step.format("*") + step.format(sign)) for sign in "+*")
    assert other["similar_steps_0.9"] == same["similar_steps_0.9"] == same["shareable_steps"] == 0.5
    assert other["shareable_steps"] == 0


def test_a_loop_of_one_token_has_no_entropy():
    assert read("a " * 500)["entropy_3"] == 0


def test_an_empty_text_has_no_shares():
    figures = read("")
    assert {name for name, value in figures.items() if value is not None} == {"tokens", "steps", "sentences", "thoughts"}
    assert set(figures) == set(MEASURES)


def test_lengths_at_which_entropy_is_read_are_reached_exactly():
    for size in (PREFIXES[0] - 1, PREFIXES[0]):
        known = read(" ".join(map(str, range(size))))[f"entropy_3_first_{PREFIXES[0]}"] is not None
        assert known == (size == PREFIXES[0])


def test_an_encoder_of_ones_own_compares_steps_and_sentences_and_is_asked_once_for_each_text():
    asked = []

    def encode(text):
        asked.append(text)
        return [1.0, 0.0] if "x" in text else [0.0, 1.0]

    figures = read("x 1\n\ny 2\n\nx 3\n\nx 1\n\n", encoder=encode)
    assert figures["similar_steps_0.9"] == 0.5
    assert figures["similar_sentences"] == 0.75
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize(("encoder", "words"), [("embedding", "a table of a model"), ("words", "encoder must be 'tokens'")])
def test_other_encoders_are_refused(encoder, words):
    with pytest.raises(ValueError, match=words):
        make_reader(["a"], None, encoder)


def test_a_tokenizer_without_marks_of_thinking_is_refused_for_texts_that_have_them():
    class Letters(TinyTokenizer):
        pieces = ("<", ">", "\n\n", "think", *"/ABC")

    with pytest.raises(ValueError, match="must be one token each"):
        make_reader(["A", "<think>B</think>"], Letters(), "tokens")
    assert make_reader(["A"], Letters(), "tokens").read("AB")["tokens"] == 2


def test_words_know_only_what_they_have_seen():
    words = Words(["so x=1.\n\n", "Ünï x"])
    assert words.decode(words.encode("Ünï x=1.\n\n")) == "Ünï x=1.\n\n"
    assert words.decode(words.encode("so y=1")) == "so =1"
