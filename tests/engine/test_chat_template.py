"""Chat messages become the text that the template describes, or a ValueError."""

import datetime
import time
import tracemalloc

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.chat_template import render
from headrace.engine.template_bounds import BoundedEnvironment, Budget, spending

CHATML = """{% for message in messages %}
    {% if loop.first and messages[0]['role'] != 'system' %}
<|im_start|>system
Be brief.<|im_end|>
    {% endif %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""

HELLO = [{"role": "user", "content": "Hello <b>&'"}]


def test_chatml_gives_the_trained_text_with_blocks_trimmed():
    assert render(CHATML, HELLO) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello <b>&'<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_generation_prompt_can_be_left_out():
    assert render(CHATML, HELLO, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_template_sees_bos_eos_and_further_variables():
    template = "{{ bos_token }}|{{ eos_token }}|{{ tools[0] }}"
    text = render(template, HELLO, bos_token="<s>", eos_token="</s>", tools=["t"])
    assert text == "<s>|</s>|t"


def test_absent_bos_is_empty_not_the_word_none():
    assert render("[{{ bos_token }}{{ eos_token }}]", HELLO) == "[]"


def test_tojson_keeps_html_characters_and_unicode():
    assert render("{{ messages[0]['content'] | tojson }}", HELLO) == '"Hello <b>&\'"'
    kanji = [{"role": "user", "content": "漢"}]
    assert render("{{ messages[0] | tojson(indent=1) }}", kanji) == (
        '{\n "role": "user",\n "content": "漢"\n}'
    )


def test_strftime_now_gives_the_current_year():
    assert render("{{ strftime_now('%Y') }}", HELLO) == str(
        datetime.datetime.now().year
    )


def test_generation_tag_and_loop_controls_are_known():
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% break %}{% endfor %}"
    )
    two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert render(template, two) == "a"


def test_refusal_of_the_template_is_a_value_error_with_its_words():
    with pytest.raises(ValueError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", HELLO)


@pytest.mark.parametrize(
    "template",
    ["{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{{ nothing.here.at.all }}", "{{ [][3].x }}"],
)
def test_fault_inside_a_template_is_a_value_error(template):
    with pytest.raises(ValueError, match="refuses the messages"):
        render(template, HELLO)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].clear() }}",
        "{{ range(10 ** 9) | length }}",
    ],
)
def test_template_cannot_leave_its_sandbox(template):
    with pytest.raises(ValueError, match="refuses the messages"):
        render(template, HELLO)


TURNS = "{% for i in range(100000) %}"
DOUBLED = "{% set n = namespace(x='a') %}" + TURNS + "{% set n.x = "


@pytest.mark.parametrize(
    "template",
    [
        TURNS * 2 + "{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
        "{% endmacro %}{{ f(99) }}",
        DOUBLED + "n.x + n.x %}{% endfor %}",
        DOUBLED + "n.x ~ n.x %}{% endfor %}",
        DOUBLED + "n.x * 2 %}{% endfor %}",
        DOUBLED + "n.x | replace('a', 'aa') %}{% endfor %}",
        DOUBLED + "[n.x, n.x] | join %}{% endfor %}",
        TURNS + "{% for m in messages %}" + "x" * 1000 + "{% endfor %}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * [0] }}",
        "{{ 'a' | center(10000000000) }}",
        "{{ 'a'.ljust(10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10000000000, 1) }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, '10000000000') }}",
        "{{ messages | tojson(indent=10000000000) }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% set n = namespace(x=3) %}"
        + TURNS
        + "{% set n.x = n.x * n.x %}{% endfor %}",
    ],
)
def test_template_can_neither_run_nor_grow_without_end(template):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="refuses the messages"):
            render(template, HELLO)
        assert tracemalloc.get_traced_memory()[1] < 500e6
    finally:
        tracemalloc.stop()


def test_a_template_is_given_some_time():
    source = "{% for i in range(1000) %}{{ slow() }}{% endfor %}"
    template = BoundedEnvironment().bounded(source)
    with spending(Budget(time_s=0.05)):
        with pytest.raises(jinja2.TemplateError, match=r"takes longer than 0.05 s"):
            template.render(slow=lambda: time.sleep(0.01))
    with spending(Budget()):
        assert template.render(slow=lambda: 1) == "1" * 1000


@given(
    st.lists(
        st.fixed_dictionaries({"role": st.text(), "content": st.text()}), min_size=1
    )
)
def test_any_messages_come_out_as_they_went_in(messages):
    template = "{% for m in messages %}{{ m.role ~ m.content + '|' }}{% endfor %}"
    wanted = "".join(f"{m['role']}{m['content']}|" for m in messages)
    assert render(template, messages) == wanted


@given(st.text(), st.text())
def test_texts_that_look_like_formats_are_only_texts(role, content):
    template = (
        "{{ '%s %5d' % (messages[0].content, 7) }}{{ '{:>4}'.format(2 ** 3) }}"
        "{{ '%s' | format(messages[0].role) }}{{ messages[0].content.strip() }}"
    )
    for text in (content, "*%1000000000d{:{}}"):
        message = {"role": role, "content": text}
        assert render(template, [message]) == f"{text}     7   8{role}{text.strip()}"


def test_template_that_does_not_parse_is_a_value_error():
    with pytest.raises(ValueError, match="does not parse"):
        render("{% if %}", HELLO)


def test_model_without_template_says_so():
    with pytest.raises(ValueError, match="no chat template"):
        render(None, HELLO)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        {"role": "user", "content": "x"},
        5,
        ["hello"],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": 1, "content": "x"}],
        [{"role": "user", "content": None}],
    ],
)
def test_bad_messages_are_refused(messages):
    with pytest.raises(ValueError, match="message"):
        render(CHATML, messages)
