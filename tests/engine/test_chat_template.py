"""Chat messages become the text that the template describes, or a ValueError."""

import datetime

import pytest

from headrace.engine.chat_template import render

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
