"""Graders: gold answers of every hard form are right, other spellings of them too, and wrong answers are wrong."""

import pytest

from jkv.evaluation import graders
from jkv.evaluation.graders import GRADERS, check_gold, failing_gold, grader_of, read_box, read_choice

pytest.importorskip("math_verify")

MATH = GRADERS["math"]
GOLD = [
    r"\frac{3}{7}", r"\dfrac{11}{4}", r"\frac29", "-3", "0.25", ".75", "007", "12,345", "98,765,432,100", r"\$27.45", r"35\%",
    r"120^\circ", r"72^{\circ}", r"7.5\text{ cm}", r"45\text{ square feet}", r"864\mbox{ inches}^2", r"\text{Beatrice}",
    r"\text{odd}", r"\text{(C)}", r"\text{Ada, Ben}", r"\text{May 17}", "3_5", "1043_5", "2A7_{16}", "[-4,9)",
    r"(-\infty,-2]\cup[6,\infty)", r"x\in[-1,8]", r"-5<x\le 2", r"\{2,5,11\}", "4,-7", r"(2,-3,\frac{\pi}{4})",
    r"5\pm2\sqrt{3}", r"\begin{pmatrix}2&0\\-1&5\end{pmatrix}", r"\begin{pmatrix} 1 \\ 9 \end{pmatrix}",
    "x=12", "y=3x-4", "x^2+5x+6", "6-2i",
    r"\sqrt[3]{4}", r"4\frac{2}{3}", r"0.1\overline{6}", "5:3", r"\emptyset", r"7!", r"\binom{9}{3}", r"2.4\times10^{-5}", "C",
    r"11\sqrt2", r"\left(\frac{1}{2},\,4\right)", r"6{,}500", r"12\text{:}45", r"|x-2|",
]  # fmt: skip
SAME = [
    (r"\frac{3}{7}", "3/7"), (r"\frac{3}{8}", "0.375"), ("12,345", "12345"), ("6500", "6{,}500"), (r"\$27.45", "27.45"),
    ("27.45", r"\$27.45"), (r"35\%", "35"), (r"35\%", "0.35"), (r"120^\circ", "120"), (r"7.5\text{ cm}", "7.5"), ("4.0", "4"),
    (r"\text{Beatrice}", "beatrice"), (r"\text{(C)}", "C"), ("C", r"\text{(C)}"), ("1043_5", "1043_{5}"), ("4,-7", "-7, 4"),
    ("4,-7", r"\{-7,4\}"), ("4,-7", r"x=4 \text{ or } x=-7"), (r"5\pm2\sqrt{3}", r"5+2\sqrt3, 5-2\sqrt3"), ("x=12", "12"),
    ("12", "x = 12"), ("x^2+5x+6", "(x+2)(x+3)"), ("y=3x-4", "y=-4+3x"), (r"0.1\overline{6}", r"\frac16"), ("6-2i", "-2i+6"),
    (r"\begin{pmatrix}2&0\\-1&5\end{pmatrix}", r"\begin{bmatrix} 2 & 0 \\ -1 & 5 \end{bmatrix}"), (r"\sqrt{12}", r"2\sqrt{3}"),
    ("[-4,9)", r"\left[ -4, 9 \right)"), ("[-1,8]", r"-1\le x\le 8"), (r"x\in[-1,8]", "[-1,8]"), (r"7!", "5040"),
    (r"(2,\frac{1}{2})", "(2, 0.5)"), (r"4\frac{2}{3}", r"\frac{14}{3}"), ("5:3", r"\frac{5}{3}"),
]  # fmt: skip
DIFFERENT = [
    (r"\frac{3}{7}", r"\frac{7}{3}"), ("12,345", "12,346"), ("12,345", "12.345"), ("98,765,432,100", "98,765,432,101"),
    (r"35\%", "3.5"), (r"120^\circ", "12"), (r"\text{Beatrice}", "Bertha"), (r"\text{listen}", "silent"),
    (r"\text{odd}", "even"),
    (r"\text{Ada, Ben}", "Ada"), (r"\text{(C)}", "D"), (r"\text{May 17}", "May 18"), ("1043_5", "1043_6"), ("1043_5", "1043"),
    ("1043_5", "1042_5"), ("[-4,9)", "[-4,9]"), ("[-4,9)", "(-4,9)"), ("(2,3)", "(3,2)"), ("(2,3)", r"\{2,3\}"),
    (r"\{2,3\}", "(2,3)"), (r"-5<x\le 2", r"-5\le x\le 2"), ("4,-7", "4"), ("4", "4,-7"), (r"5\pm2\sqrt{3}", r"5+2\sqrt{3}"),
    (r"\begin{pmatrix}2&0\\-1&5\end{pmatrix}", r"\begin{pmatrix}2&-1\\0&5\end{pmatrix}"), ("x=12", "y=12"), ("x=12", "x=13"),
    ("y=3x-4", "y=3x+4"), (r"0.1\overline{6}", "0.1"), (r"0.\overline{6}", "0"), ("0.0000001", "0.0000002"), ("6-2i", "6+2i"),
    ("42", r"\text{none}"), ("42", "?"), ("42", ""), ("", ""), ("3", "x" * 1000), ("7", r"\frac{7"), ("7", r"\begin{"),
    ("x", "y"),
    (r"\emptyset", "0"), ("100", "10^3"), ("12:45", "12:46"),
]  # fmt: skip


@pytest.mark.parametrize("gold", GOLD)
def test_a_gold_answer_in_a_box_is_right(gold):
    assert MATH(rf"<think> 1 \boxed{{0}} </think> So it is $\boxed{{{gold}}}$.", gold)


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_another_spelling_of_the_gold_answer_is_right(gold, answer):
    assert MATH(rf"\boxed{{{answer}}}", gold)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_another_answer_is_wrong(gold, answer):
    assert not MATH(rf"\boxed{{{answer}}}", gold)


@pytest.mark.parametrize("gold", [answer for answer in GOLD if answer != "3_5"])
def test_no_gold_answer_is_another(gold):
    assert not MATH(r"\boxed{3_5}", gold)


def test_only_the_last_box_after_the_thinking_counts():
    assert MATH(r"\boxed{1} no, \boxed{\frac{1}{2}}", "0.5")
    assert not MATH(r"\boxed{\frac{1}{2}} no, \boxed{1}", "0.5")
    assert not MATH(r"\boxed{2}</think> The answer is 2.", "2")  # said, but in no box
    assert read_box(r"\boxed{\{1, \frac{1}{2}\}} and") == r"\{1, \frac{1}{2}\}"
    assert read_box(r"so \boxed{\frac{1}{2}") is None  # cut off by the token limit


def test_an_answer_that_would_take_for_ever_is_wrong_after_the_time_limit(monkeypatch):
    monkeypatch.setattr(graders.MATH_VERIFY, "seconds", 1.0)
    assert not MATH(r"\boxed{10^{10^{10^{10}}}}", "2")


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"</think>\boxed{C}", "C"),
        (r"\boxed{\text{(C)}}", "C"),
        (r"\boxed{C.}", "C"),
        ("I first thought A. **Answer: C**", "C"),
        ("The answer is (C).", "C"),
        ("Answer: A... wait. Answer: C", "C"),
        (r"\boxed{CD}", None),
        (r"\boxed{cat}", None),
        (r"\boxed{\frac{C}{2}} Answer: C", None),
        ("The answer is Carbon.", None),
        ("A B C D", None),
        ("Answer: C </think> none of them", None),
    ],
)
def test_a_choice_is_one_letter_that_was_chosen(text, letter):
    assert read_choice(text) == letter
    assert GRADERS["choice"](text, "C") == (letter == "C")
    assert not GRADERS["choice"](text, "D")


def test_a_grader_that_fails_gold_answers_is_refused_by_name_of_the_answers():
    answers = ["7", r"\frac{1}{2}", "d=1", r"\{3\}"]
    assert failing_gold(answers, GRADERS["boxed"]) == [1, 3]  # it reads no braces
    with pytest.raises(ValueError, match=r"fails 2 of 4: 1 '.*frac\{1\}\{2\}', 3 .*skip_ungradable"):
        check_gold(answers, GRADERS["boxed"])
    check_gold(answers, MATH)
    assert failing_gold(["", "  ", "3"], MATH) == [0, 1]


def test_an_unknown_grader_lists_those_that_there_are():
    with pytest.raises(ValueError, match="one of boxed, math, choice; got 'judge'"):
        grader_of("judge")


def test_a_grader_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "jkv-cache\[eval\]"'):
        grader_of("math")
    assert grader_of("choice") is GRADERS["choice"]
