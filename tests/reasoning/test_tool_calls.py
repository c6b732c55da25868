"""Tool calls in texts: each form's golden text, streams of any pieces, and texts that only look like calls."""

import json

import numpy as np
import pytest

from jkv.reasoning.json_scanner import JsonScanner
from jkv.reasoning.tool_calls import FORMS, CallSplitter, form_of

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}}}
FUNCTIONS = {"weather": SCHEMA, "now": {"type": "object", "properties": {}}}
CALL = ("weather", {"city": 'Zürich "HB"\n', "days": 3, "tags": ["a", {"b": None}]})
ARGUMENTS = json.dumps(CALL[1])
ONE, NOW = f'{{"name": "weather", "arguments": {ARGUMENTS}}}', '{"name": "now", "arguments": {}}'
TAGGED = """<tool_call>
<function=weather>
<parameter=city>
Zürich "HB"

</parameter>
<parameter=days>
3
</parameter>
<parameter=tags>
["a", {"b": null}]
</parameter>
</function>
</tool_call>"""
GLM = """<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Zürich "HB"
</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
<arg_key>tags</arg_key>
<arg_value>["a", {"b": null}]</arg_value>
</tool_call>"""
GOLDEN = [  # the form, text, content, calls
    ("hermes", f"Let me see.\n<tool_call>\n{ONE}\n</tool_call>", "Let me see.", [CALL]),
    (
        "hermes",
        '<tool_call>{"arguments": {}, "name": "now"}</tool_call>\n<tool_call>{"name": "now"}</tool_call>',
        "",
        ["now"] * 2,
    ),
    ("hermes", f"<tool_call>[{ONE}, {NOW}]</tool_call>", "", [CALL, "now"]),
    ("hermes", f"<tool_call>{ONE}\n</tool_ca", "", [CALL]),
    ("hermes", f"<tool_call>{ONE[:-1]}</tool_call> Done.", "Done.", [CALL]),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}</tool_call>', "", [CALL]),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}, "id": {{"a": 1}}}}', "", [CALL]),
    ("qwen3_coder", "I look.\n\n" + TAGGED, "I look.", [CALL]),
    ("qwen3_coder", TAGGED + "\n" + "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [CALL, "now"]),
    ("glm", "\nI look.\n" + GLM, "\nI look.", [CALL]),
    ("glm", GLM.replace(">\n<", "><") + "<tool_call>now</tool_call>", "", [CALL, "now"]),
    ("llama3", ONE.replace("arguments", "parameters"), "", [CALL]),
    ("llama3", '{"type": "function", ' + f"{ONE[1:]}; {NOW}", "", [CALL, "now"]),
    ("mistral", f"[TOOL_CALLS][{ONE}, {NOW}]", "", [CALL, "now"]),
    (
        "mistral",
        f"I look.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{{}}",
        "I look.",
        [CALL, "now"],
    ),
    ("mistral", f"[TOOL_CALLS]weather{ARGUMENTS}", "", [CALL]),
]
TEXTS = [  # that look like calls, and are none
    ("hermes", "<tool_call>{weather}</tool_call>"),
    ("hermes", "<tool_call>weather(3)</tool_call> and more  "),
    ("hermes", 'Write <tool_call>{"name": "f", "arguments": {...}}</tool_call>.'),
    ("hermes", 'a \n<tool_call>\n{"name": "f", "arguments": {"x": }}\n</tool_call>\n'),
    ("hermes", '<tool_call>{"name": "f", "argu'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", "x <tool_call"),
    ("hermes", '<tool_call>{"a": ' + "[" * 200),
    ("qwen3_coder", '<tool_call>{"name": "f"}</tool_call>'),
    ("qwen3_coder", "<tool_call>\n<function=f>\nhello</function>"),
    ("qwen3_coder", "<tool_call><function=" + "f" * 300 + ">"),
    ("glm", "<tool_call>call me <b>now</b></tool_call>"),
    ("llama3", '{"name": "Ann", "parameters": {"age": 3}}'),
    ("llama3", 'See {"name": "now", "parameters": {}}'),
    ("llama3", '{"weather": 3}'),
    ("mistral", "[TOOL_CALLS] are two words {}"),
    ("mistral", "[TOOL_CALLS][1]"),
]
BROKEN = [  # calls that end in the middle, or whose later arguments are no JSON: what was written
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Par', '{"city": "Par'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "a", oh}}</tool_call>', '{"city": "a", oh}}'),
    ("qwen3_coder", "<tool_call><function=weather><parameter=city>\nPar\n</para", '{"city": "Par\\n</para'),
    ("glm", "<tool_call>weather<arg_key>days</arg_key><arg_value>3", '{"days": 3'),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": nope', '{"city": nope'),
]


def read(form, text, cuts=(), **options):
    """The content, and name and arguments of each call, of a text that comes in pieces."""
    splitter, content, calls = CallSplitter(FORMS[form], FUNCTIONS, **options), "", []
    ends = [*cuts, len(text)]
    found = [splitter.push(text[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    for more, pieces in [*found, splitter.finish()]:
        content += more
        for piece in pieces:
            if piece.name is not None:
                assert piece.index == len(calls)
                calls.append([piece.name, ""])
            calls[piece.index][1] += piece.arguments
    return content, calls


@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if not form.has_channels])
def test_calls_are_found_in_the_golden_texts_of_each_form(form):
    for _, text, content, calls in [one for one in GOLDEN if one[0] == form]:
        found = read(form, text)
        assert found[0] == content
        expected = [(one, {}) if isinstance(one, str) else one for one in calls]
        assert [(name, json.loads(arguments)) for name, arguments in found[1]] == expected
        assert read(form, text, has_many=False) == (content, found[1][:1])


def test_values_between_tags_have_the_types_of_the_schema():
    fields = {"a": "string", "b": "integer", "c": ["string", "null"], "e": "boolean", "f": "number", "g": "object"}
    schema = {"properties": {name: {"type": kind} for name, kind in fields.items()}}
    schema["properties"] |= {"d": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "h": {"enum": ["1", "2"]}}
    values = {"a": "3", "b": "3", "c": "3", "d": "None", "e": "True", "f": "NaN", "g": "{}", "h": "1", "i": "3", "j": "x"}
    text = "<tool_call>f" + "".join(
        f"<arg_key>{name}</arg_key><arg_value>{value}</arg_value>" for name, value in values.items()
    )
    splitter = CallSplitter(FORMS["glm"], {"f": schema})
    (call,) = splitter.push(text + "</tool_call>")[1]
    wanted = {"a": "3", "b": 3, "c": "3", "d": None, "e": True, "f": "NaN", "g": {}, "h": "1", "i": 3, "j": "x"}
    assert json.loads(call.arguments) == wanted


def test_what_only_looks_like_a_call_stays_text():
    for form, text in TEXTS:
        assert read(form, text) == (text, []), text


def test_a_call_that_breaks_off_has_what_was_written():
    for form, text, arguments in BROKEN:
        assert read(form, text) == ("", [["weather", arguments]]), text


def test_a_stream_adds_up_to_the_same_however_it_is_cut():
    rng = np.random.default_rng(0)
    texts = [one[:2] for one in (*GOLDEN, *TEXTS, *BROKEN)]
    for form in {one[0] for one in GOLDEN}:
        own = [text for name, text in texts if name == form]
        texts += [(form, "".join(rng.permutation(own))) for _ in range(5)]
    for form, text in texts:
        whole = read(form, text)
        for size in (1, 2, 3, 7):
            assert read(form, text, range(size, len(text), size)) == whole, (size, text)
        for _ in range(5):
            cuts = sorted(rng.integers(0, len(text), 4).tolist())
            assert read(form, text, cuts) == whole, (cuts, text)


def test_arguments_grow_while_the_model_writes():
    splitter = CallSplitter(FORMS["hermes"], FUNCTIONS)
    text = f'<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}}}</tool_call>'
    pieces = [piece for char in text for piece in splitter.push(char)[1]]
    assert [piece.name for piece in pieces] == ["weather"] + [None] * (len(pieces) - 1)
    assert len(pieces) > 40
    tagged = CallSplitter(FORMS["qwen3_coder"], FUNCTIONS)
    assert sum(len(tagged.push(char)[1]) for char in TAGGED) > 10  # a text grows too


def test_a_template_shows_its_form():
    templates = {
        "harmony": "{{ '<|channel|>commentary ' }}",
        "hermes": "{{ '<tool_call>' }}",
        "qwen3_coder": "{{ '<tool_call>\n<function=' }}",
        "glm": "<tool_call>{{ name }}<arg_key>",
        "mistral": '{{ "[TOOL_CALLS]" }}',
        "llama3": "{{ '<|python_tag|>' }}",
    }
    assert {name: form_of(template).name for name, template in templates.items()} == {name: name for name in FORMS}
    assert form_of("{{ messages }}") is None


def test_the_scanner_takes_what_json_takes():
    rng = np.random.default_rng(1)
    letters = list('{}[]",:\\u0a1-.eE+ \ntrufalsn')
    for _ in range(3000):
        text = rng.choice(["[", "{"]) + "".join(rng.choice(letters, rng.integers(1, 8)))
        for end in ("", "]", "}", '"]', ":1}", '":1}'):
            scanner = JsonScanner()
            found = all(scanner.take(char) for char in text + end) and scanner.is_done
            try:
                json.loads(text + end)
            except ValueError:
                assert not found, text + end
            else:
                assert found, text + end
