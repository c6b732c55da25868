"""Chat templates: genuine ones render as in transformers, hostile ones end in a ValueError with their line."""

import time
import types

import pytest

from jkv.checkpoints.chat_template import ChatRenderer, render_chats
from research.tasks import vocabulary

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 < 2?\n\u00e9\ud800"},
    {"role": "assistant", "content": "<think>\nyes\n</think> Yes.", "tool_calls": None},
    {"role": "user", "content": "And \u2028 3?"},
]
CHATML = """{% for message in messages %}
    {%- if loop.first and message.role != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
NAMESPACE = """{%- set state = namespace(system='', first=true) -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{%- set state.system = message.content -%}{%- continue -%}{%- endif -%}
    {%- if state.first -%}{{ eos_token ~ state.system }}{%- set state.first = false -%}{%- endif -%}
    {%- if '</think>' in message.content -%}{{ message.content.split('</think>')[-1] }}{%- else -%}
    {%- generation -%}{{ message.content | tojson }}{%- endgeneration -%}{%- endif -%}
{%- endfor -%}"""


def with_template(template):
    return types.SimpleNamespace(name_or_path="org/model", special_tokens_map={}, get_chat_template=lambda: template)


@pytest.mark.parametrize("template", [CHATML, NAMESPACE], ids=["chatml", "namespace"])
@pytest.mark.parametrize("options", [{"add_generation_prompt": True}, {"continue_final_message": True}, {}], ids=str)
def test_a_genuine_template_renders_as_in_transformers(template, options):
    tokenizer = vocabulary.make_tokenizer()
    tokenizer.chat_template = template
    turns = [TURNS[0], {"role": "user", "content": "Go"}] if options.get("continue_final_message") else TURNS
    expected = tokenizer.apply_chat_template(turns, tokenize=False, **options)
    assert render_chats(tokenizer, [turns, turns], **options) == [expected] * 2
    assert tokenizer.eos_token in expected or template == CHATML


SECONDS = 0.5
SLOW = f"more than {SECONDS} sec"
HOSTILE = {  # name -> template, the line that fails, what the message says
    "power": ("a\n{{ 10**(10**10) }}", 2, SLOW),
    "power-in-a-filter": ("a\nb\n{{ (10**(10**10)) | string }}", 3, SLOW),
    "loops": ("{% for a in range(99999) %}\n{% for b in range(99999) %}{% set c = b %}\n{% endfor %}{% endfor %}", None, SLOW),
    "round": ("\n{{ 7 | round(-400000000) }}", None, SLOW),
    "sort": ("\n{% for a in range(9999) %}{% set b = range(99999) | sort(reverse=true) %}{% endfor %}", 2, SLOW),
    "large-range": ("{% for a in range(10**9) %}{% endfor %}", 1, "Range too big"),
    "long-text": ("a\n{{ 'x' * 10**10 }}", 2, "512 MiB"),
    "long-list": ("a\n{{ [0] * 10**10 }}", 2, "512 MiB"),
    "center": ("a\n{{ 'x' | center(10**10) }}", 2, "512 MiB"),
    "indent": ("a\n{{ 'x\\nx' | indent(10**10) }}", 2, "512 MiB"),
    "format": ("a\n{{ '%9999999999d' % 1 }}", 2, "512 MiB"),
    "format-method": ("a\n{{ '{:>9999999999}'.format(1) }}", 2, "512 MiB"),
    "doubling": ("{% set s = namespace(t='x') %}\n{% for a in range(99) %}{% set s.t = s.t + s.t %}{% endfor %}", 2, "512 MiB"),
    "lipsum": ("\n{{ lipsum(n=100000000) }}", "lines? (1 to )?2[:,]", ""),  # short of memory, Python may lose the frame
    "long-output": ("{% for a in range(9999) %}\n{{ 'x' * 1000 }}{% endfor %}", None, "8,388,608 characters"),
    "recursion": ("\n{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", 2, "RecursionError"),
    "mutual-recursion": (
        "{% macro f() %}\n{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
        None,
        "Error",
    ),
    "nesting": ("{% if true %}" * 3000 + "{% endif %}" * 3000, None, "Error"),
    "deep-expression": ("{{ " + "(" * 20000 + ")" * 20000 + " }}", None, "Recursion"),
    "class": ("\n{{ ().__class__.__bases__ }}", 2, "SecurityError"),
    "globals": ("\n{{ cycler.__init__.__globals__.os.system('true') }}", 2, "SecurityError"),
    "attr": ("\n{{ (''|attr('__class__')).x }}", 2, "SecurityError"),
    "import": ("\n{% import 'os' as os %}", 2, ""),
    "include": ("\n{% include '/etc/passwd' %}", 2, ""),
    "raise": ("\n\n{{ raise_exception('roles must alternate') }}", 3, "TemplateError: roles must alternate"),
    "syntax": ("a\n{% for x in y", 2, "TemplateSyntaxError"),
    "unknown-tag": ("a\n{% explode %}", 2, "TemplateSyntaxError"),
    "unknown-filter": ("a\n{{ 'x' | explode }}", 2, "TemplateAssertionError"),
    "undefined": ("a\n{{ x.y.z }}", 2, "UndefinedError"),
    "division": ("a\n\n{{ 1 / 0 }}", 3, "ZeroDivisionError"),
    "type": ("a\n{{ 'x' + 1 }}", 2, "TypeError"),
    "index": ("a\n{{ messages[99].role }}", 2, "UndefinedError"),
    "bad-number": ("a\n{{ '9' * 5000 | int + 1 }}", 2, ""),
    "change": ("a\n{{ messages.append(1) }}", 2, "SecurityError"),
    "loop-exit": ("{% for a in messages %}\n{% do 1 %}{% endfor %}", 2, "TemplateSyntaxError"),
    "time-format": ("a\n{{ strftime_now(1) }}", 2, "TypeError"),
}


@pytest.fixture(scope="module")
def renderer():
    """One process for all templates; those that take too long end it, and the next template starts another."""
    with ChatRenderer(with_template("a"), SECONDS) as renderer:
        yield renderer


@pytest.mark.parametrize(("template", "line", "says"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_a_value_error_with_its_line(template, line, says, renderer):
    renderer.template = template
    renderer.seconds = SECONDS if says == SLOW else 30.0  # so that a busy machine does not end the others by the clock
    begin = time.monotonic()
    place = f"line {line}:" if isinstance(line, int) else line or "line"
    with pytest.raises(ValueError, match=rf"(?s)template of org/model must.*{place}.*{says}.*Correct chat_template"):
        renderer.render(TURNS[:2])
    assert time.monotonic() - begin < 60  # of which most are imports


def test_a_template_that_takes_long_to_compile_is_refused_too(renderer):
    renderer.template = "x\n{{ 'a\\na' | indent(7 | round(-400000000)) }}"  # which the compiler computes
    renderer.seconds = SECONDS
    with pytest.raises(ValueError, match=rf"lines 1 to 2, while it was compiled: it took {SLOW}"):
        renderer.render(TURNS[:2])


def test_a_renderer_goes_on_after_a_failure_and_ends_its_process():
    template = "{% set text = messages[0].content %}{{ 10**(10**10) if text == 'hang' }}{{ text.x.y if text == 'bad' }}ok"
    with ChatRenderer(with_template(template), SECONDS) as renderer:
        assert renderer.render([{"role": "user", "content": "a"}]) == "ok"
        first = renderer.process
        with pytest.raises(ValueError, match="UndefinedError"):
            renderer.render([{"role": "user", "content": "bad"}])
        assert renderer.process is first
        with pytest.raises(ValueError, match=SLOW):
            renderer.render([{"role": "user", "content": "hang"}])
        assert renderer.render([{"role": "user", "content": "a"}]) == "ok"
        last = renderer.process
    assert None not in (first.poll(), last.poll())


def test_a_missing_jinja_is_named(tmp_path, monkeypatch):
    (tmp_path / "jinja2.py").write_text("raise ImportError('no jinja2 here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"needs jinja2: no jinja2 here.*pip install jinja2"):
        render_chats(with_template("a"), [TURNS[:2]])
