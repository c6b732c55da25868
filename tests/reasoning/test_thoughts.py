"""Stage 1: thoughts, their similarity, and the syntax trees of their formulas."""

import numpy as np
import pytest

from jkv.reasoning.formulas import form_of
from jkv.reasoning.thoughts import Embeddings, Filter, FilterStats, ThoughtFinder, TokenBags, make_index
from jkv.reasoning.token_text import facts_of
from jkv.testing import TinyTokenizer

FACTS = facts_of(TinyTokenizer(), 32)
NEW_LINE = 31  # of a tokenizer that has a token for the end of a line


def finder(rule=None, stats=None, index=None):
    rule = rule or Filter(structure=False)
    return ThoughtFinder(rule, FACTS, TinyTokenizer().decode, index or TokenBags(32), stats or FilterStats())


def found(tokens, **settings):
    """For each thought: its index, its span, and the similar earlier thoughts."""
    one = finder(**settings)
    events = [one.take(token, i + 1) for i, token in enumerate(tokens)]
    return [(i, (one.thoughts[i].begin, one.thoughts[i].end), similar) for i, similar in filter(None, events)]


def test_thoughts_end_at_blank_lines_and_where_thinking_begins_or_ends():
    tokens = TinyTokenizer().encode("<think>\n\nAB.\n\nCD\n\n\n\nEF</think>GH")
    assert found(tokens) == [(0, (2, 5), []), (1, (5, 8), []), (2, (9, 12), [])]


def test_two_ends_of_lines_are_a_blank_line():
    """Other tokens between them, or a new line after the blank one, end no thought."""

    class Lines(TinyTokenizer):
        def decode(self, ids, **settings):
            return "".join("\n" if i == NEW_LINE else super(Lines, self).decode([i], **settings) for i in ids)

    letter = TinyTokenizer().encode("A")[0]
    facts = facts_of(Lines(), 32)
    assert (facts.starts_line[NEW_LINE], facts.ends_line[NEW_LINE], facts.is_break[NEW_LINE]) == (True, True, False)
    one = ThoughtFinder(Filter(), facts, Lines().decode, TokenBags(32), FilterStats())
    tokens = [letter, NEW_LINE, letter, NEW_LINE, NEW_LINE, NEW_LINE, letter, NEW_LINE, letter, letter, NEW_LINE, NEW_LINE]
    ends = [i for i, token in enumerate(tokens) if one.take(token, i + 1)]
    assert ends == [4, 11]
    assert [(thought.begin, thought.end) for thought in one.thoughts] == [(0, 5), (6, 12)]


def test_an_unfinished_thought_is_not_found():
    assert found(TinyTokenizer().encode("AB")) == []


def by_hand(thoughts, rule):
    """The similar earlier thoughts of each, from dense vectors and Eqs. 1 and 2 of ReasonCache."""
    out = []
    for i, new in enumerate(thoughts):
        v = np.bincount(new, minlength=32)
        similar = []
        for old in thoughts[:i]:
            w = np.bincount(old, minlength=32)
            sizes = [FACTS.num_bytes[thought].sum() for thought in (new, old)]
            similar.append(v @ w / np.linalg.norm(v) / np.linalg.norm(w) * min(sizes) / max(sizes))
        threshold = rule.strict - (rule.strict - rule.soft) * (np.mean(similar) if similar else 0)
        out.append([j for j, x in enumerate(similar) if x > threshold])
    return out


@pytest.mark.parametrize(
    "rule", [Filter(0.9, 0.7, structure=False), Filter(0.6, 0.6, structure=False), Filter(1.0, 0.0, False)]
)
def test_similarity_is_the_papers_formula(rule):
    rng = np.random.default_rng(0)
    thoughts = [rng.choice([3, *range(4, 12)], size=rng.integers(1, 9), p=[0.04] + [0.12] * 8).tolist() for _ in range(300)]
    thoughts = [[token for token in thought if token != 3] or [5] for thought in thoughts]
    got = found([token for thought in thoughts for token in (*thought, 2)], rule=rule)
    expected = by_hand([np.array(thought) for thought in thoughts], rule)
    assert [similar for _, _, similar in got] == expected
    assert sum(map(len, expected)) > 50


def test_a_mean_embedding_or_an_encoder_may_replace_token_bags():
    rng = np.random.default_rng(1)
    table = rng.standard_normal((32, 6)).astype(np.float32)
    thoughts = [rng.integers(4, 32, 5) for _ in range(200)]
    for index, vectors in (
        (make_index(Filter(encoder="embedding"), 32, lambda: table), [table[thought].mean(axis=0) for thought in thoughts]),
        (Embeddings(lambda tokens, text: [len(text()), 1.0]), [np.array([5.0, 1.0])] * 200),
    ):
        for i, thought in enumerate(thoughts):
            got = index.compare(thought.tolist(), lambda thought=thought: TinyTokenizer().decode(thought))
            unit = np.array([v / np.linalg.norm(v) for v in vectors[: i + 1]])
            np.testing.assert_allclose(got, unit[:i] @ unit[i], atol=1e-5)


class CodeTokenizer(TinyTokenizer):
    """White space is in separate tokens, as in large vocabularies."""

    pieces = (
        *TinyTokenizer.pieces[:4],
        "\n",
        "    ",
        "```python",
        "```",
        *(chr(i) for i in range(97, 117)),
        ":",
        "(",
        ")",
        "=",
    )


def test_formulas_are_parsed_with_their_white_space():
    """Two programs that differ only in indentation have equal bags of tokens and different trees."""
    tokenizer = CodeTokenizer()
    programs = [f"```python\na:\n    b()\n{indent}c()\n```" for indent in ("    ", "")]
    texts = [text.replace("a:", "if a:") for text in programs]
    assert form_of(texts[0])[0] != form_of(texts[1])[0]
    tokens = [token for text in (*texts, texts[0]) for token in tokenizer.encode(f"{text}\n\n".replace(" a", "    a"))]
    facts, stats = facts_of(tokenizer, len(tokenizer)), FilterStats()
    one = ThoughtFinder(Filter(0.5, 0.5), facts, tokenizer.decode, TokenBags(len(tokenizer)), stats)
    similar = [event[1] for event in (one.take(token, 0) for token in tokens) if event]
    assert similar == [[], [], [0]]
    assert stats.similar == 3
    assert stats.unparsed == 0


def test_a_vector_that_is_not_finite_or_of_another_length_is_refused():
    vectors = iter([[1.0, 2.0], [1.0, 2.0, 3.0], [np.nan, 1.0]])
    index = Embeddings(lambda tokens, text: next(vectors))
    index.compare([4], str)
    for _ in range(2):
        with pytest.raises(ValueError, match="finite vectors of one length"):
            index.compare([4], str)


def test_stage_1_counts_thoughts_pairs_and_similar_pairs():
    stats = FilterStats()
    found(TinyTokenizer().encode("ABC\n\nABC\n\nXYZ\n\n"), stats=stats)
    assert (stats.steps, stats.compared, stats.similar, stats.kept) == (3, 3, 1, 1)


EQUAL = [
    ("so d=b*c.", "d = b * c"),
    ("d=b*c b=3", "first d=b*c, then b=3."),
    ("2x+5=10", "2*x + 5 = 10"),
    ("(a+b)c=4", "(a + b)*c=4"),
    ("y=x^2", "y = x**2"),
    (r"\(\frac{a}{b}\)", r"$\frac {a} {b}$"),
    ("```python\nx = 1  # one\n```", "```\nx=1\n```"),
    ("no formulas at all", "other words"),
    ("x=", "y="),  # no operand, no equation
    ("12 ÷ 3 \u00d7 2", "so 12/3*2."),
    ("x ≥ 3", "x>=3"),
    ("a well-known fact", "a little-known fact"),  # words, not a difference
    ("**First** we look", "First, **we** look"),
    ("<think>\nso x=1", "so x = 1\n</think>"),
    (r"\frac{1}{2}+x", r"so \frac{1}{2} + x"),
]
UNEQUAL = [
    ("$2x+5=10$", "$2x-5=10$"),
    ("d=b*c", "d=b+c"),
    ("d=b*c", "e=b*c"),
    ("b=3", "b=4"),
    ("a-b=c", "b-a=c"),
    ("d=b*c", "no formula"),
    (r"$\frac{a}{b}$", r"$\frac{b}{a}$"),
    (r"$x^2$", r"$x_2$"),
    ("```python\nfor i in x: f(i)\n```", "```python\nfor i in x: g(i)\n```"),
    ("b=3 c=7", "c=7 b=3"),
    ("a+b", "a-b"),
    ("thus 3 + 4", "thus 3 - 4"),
    ("x >= 3", "x <= 3"),
    ("x > 3", "x ≥ 3"),
    ("at most ≤ 3", "at most ≥ 3"),
    (r"\frac{1}{2}+\frac{1}{3}", r"\frac{1}{2}-\frac{1}{3}"),
    (r"\frac{\sqrt{2}}{3}", r"\frac{\sqrt{2}}{4}"),
    (r"\sin x", r"\sin y"),
    ("12 ÷ 3", "12 ÷ 4"),
    ("12 ÷ 3", "12 \u00d7 3"),
    ("a → b", "b → a"),
    ("x ∈ A", "x ∉ A"),
    ("total - cost", "total + cost"),
    ("x**2", "x*2"),
    ("x != 3", "x = 3"),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_trees(one, other):
    assert form_of(one)[0] == form_of(other)[0]
    assert form_of(one)[1] == 0


@pytest.mark.parametrize(("one", "other"), UNEQUAL)
def test_unequal_trees(one, other):
    assert form_of(one)[0] != form_of(other)[0]


SIGNS = ["+", "-", "*", "/", "^", "=", "<", ">", "<=", ">=", "!=", "\u00d7", "÷", "≤", "≥", "≠", "≈", "→", "∈", "⊂", "±"]
ALIKE = [{"*", "\u00d7"}, {"/", "÷"}, {"<=", "≤"}, {">=", "≥"}, {"!=", "≠"}]


@pytest.mark.parametrize("blank", ["", " "])
def test_formulas_that_differ_in_one_sign_are_never_equal(blank):
    rng = np.random.default_rng(0)
    operands = ["a", "b", "x1", "12", "3.5", "(y+2)", "f(t)", "rate", r"\alpha", r"\frac{1}{2}"]
    for _ in range(400):
        parts = list(rng.choice(operands, 4))
        signs = list(rng.choice(SIGNS, 3))
        place, other = int(rng.integers(3)), str(rng.choice(SIGNS))
        if other == signs[place] or {other, signs[place]} in ALIKE:
            continue
        one, two = (
            "So we get "
            + "".join(f"{part}{blank}{sign}{blank}" for part, sign in zip(parts, [*chosen, ""], strict=True)).strip()
            for chosen in (signs, [*signs[:place], other, *signs[place + 1 :]])
        )
        assert form_of(one)[0] != form_of(two)[0], (one, two)


BROKEN = [
    "```python\ndef f(:\n```",
    r"$\frac{a$",
    "x=(3+",
    "f(=)3",
    "a==b==)",
    "```\n" + "(" * 5000 + "\n```",
    "x=" + "-" * 300 + "1",
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_span_that_does_not_parse_is_compared_by_its_tokens_and_counted(text):
    form, unparsed = form_of(text)
    assert form == form_of(text.replace(" ", "  "))[0]
    if form:
        assert unparsed == sum(tree[0] == "tokens" for tree in form)


def test_no_text_raises_or_takes_long():
    rng = np.random.default_rng(0)
    alphabet = list("ab1=+-*/^()[]{}$\\ .\n`_<>é\x00\ud7ff")
    for _ in range(400):
        form_of("".join(rng.choice(alphabet, rng.integers(0, 60))))
    form_of("a" * 200_000 + "=" * 200_000)
    form_of("$" * 10_000 + "```" * 1000)
    for opening in ("\\[", "\\(", "$$ ", "$$ \\( ", "```", "$a", "x=" * 9, "("):
        form_of(opening * (8000 // len(opening)))
