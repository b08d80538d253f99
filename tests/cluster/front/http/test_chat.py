"""A chat's prompt: what of a request its template gets to see, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cluster.front.http.chat import ChatTemplate
from cluster.front.http.schemas import ChatRequest
from engine.types import InvalidRequest
from tests.forms import byte_tokenizer

USER = {"role": "user", "content": "hi"}


def made(template: str) -> ChatTemplate:
    return ChatTemplate(PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(()), chat_template=template))


def prompt(template: str, *messages: dict[str, Any], **given: Any) -> str:
    asked = ChatRequest.model_validate({"messages": messages or [USER], **given})
    asked.check_served()
    return made(template).prompt(asked)


def test_documents_are_the_templates_to_read() -> None:
    template = "{% for document in documents %}{{ document.text }};{% endfor %}{{ messages[0].content }}"
    given = [{"title": "t", "text": "a"}, {"title": "u", "text": "b"}]
    assert prompt(template, documents=given) == "a;b;hi"
    assert prompt(template, chat_template_kwargs={"documents": given[:1]}) == "a;hi"


@pytest.mark.parametrize(("key", "value"), [("echo", True), ("thinking_token_budget", 64)])
def test_what_a_chat_cannot_do_is_refused(key: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{key} is {value}; this server does not do that, so leave it out"):
        prompt("x", **{key: value})
    assert prompt("x", **{key: None}) == "x"


def test_what_has_another_name_here_is_told_it() -> None:
    with pytest.raises(InvalidRequest, match=r"guided_regex is a\+; give structured_outputs.regex instead"):
        prompt("x", guided_regex="a+")


@pytest.mark.parametrize(
    "wrong",
    ["{{ 1 // (messages[0].content | int) }}", "{{ 10.0 ** 400 }}", "{{ messages[0].x.y }}", "{% break %}", "{% if %}"],
)
def test_what_a_template_stumbles_at_is_the_clients_to_mend(wrong: str) -> None:
    with pytest.raises(InvalidRequest, match="messages cannot be read by the model's template"):
        prompt(wrong)


def test_parts_of_a_message_are_read_as_one_text() -> None:
    parts = [
        {"type": "thinking", "thinking": "a"},
        {"type": "refusal", "refusal": "b"},
        {"type": "output_text", "text": "c"},
        {"text": "d"},
    ]
    assert prompt("{{ messages[0].content }}", {"role": "assistant", "content": parts}) == "a\nb\nc\nd"
    wrong: Any
    for wrong in ({"type": "image_url", "image_url": {}}, {"type": ["text"]}):
        with pytest.raises(InvalidRequest, match=r"messages\.0\.content has a part of type .*; this model reads text"):
            prompt("x", {"role": "user", "content": [wrong]})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"content": [{"type": "text", "text": None}]}, "content has a part of type text without a text as its text"),
        (
            {"content": [{"type": "refusal", "text": "b"}]},
            "content has a part of type refusal without a text as its re",
        ),
        ({"tool_calls": [{"function": {"arguments": '{"a":'}}]}, "tool_calls has arguments that are no JSON: "),
    ],
    ids=["text", "refusal", "arguments"],
)
def test_a_message_that_cannot_be_read_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"messages\.1\.{said}"):
        prompt("x", USER, {"role": "assistant", **wrong})


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_an_empty_list_of_tools_is_none_to_choose_from(choice: str | None) -> None:
    assert prompt("{{ tools is none }}", tools=[], tool_choice=choice) == "True"


def test_a_choice_of_tools_wants_some() -> None:
    with pytest.raises(InvalidRequest, match="tool_choice is auto, and there are no tools; give both or neither"):
        prompt("x", tool_choice="auto")


@pytest.mark.parametrize(("known", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_a_developer_is_the_system_where_the_template_knows_none(known: str, role: str) -> None:
    assert prompt("{{ messages[0].role }}" + known, {"role": "developer", "content": "x"}, USER) == role
    assert prompt("{{ messages[0].role }}" + known, {"role": "tool", "content": "x"}) == "tool"


PARTS = "{% for part in message.content %}[{{ part.text }}]{% endfor %}"
ALL = "{% for message in messages %}CONTENT{% endfor %}"


def test_a_template_that_reads_parts_alone_gets_parts() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "input_text", "text": "c"}]},
        {"role": "assistant", "content": None},
    ]
    assert prompt(ALL.replace("CONTENT", PARTS), *messages) == "[a][b][c]"
    strict = PARTS.replace("part.text", "part['text'] | trim")
    assert prompt(ALL.replace("CONTENT", strict), *messages) == "[a][b][c]"
    both = "{% if message.content is string %}{{ message.content }};{% else %}" + PARTS + "{% endif %}"
    assert prompt(ALL.replace("CONTENT", both), *messages) == "a;b\nc;;"


@pytest.mark.parametrize("of_users", [True, False])
def test_each_role_s_content_is_as_the_template_reads_it(of_users: bool) -> None:
    text = "{% if message.content is string %}{{ message.content }};{% endif %}"
    users, others = (PARTS, text) if of_users else (text, PARTS)
    template = ALL.replace("CONTENT", f"{{% if message.role == 'user' %}}{users}{{% else %}}{others}{{% endif %}}")
    messages = ({"role": role, "content": role} for role in ("system", "user", "assistant", "tool", "user"))
    wanted = "system;[user]assistant;tool;[user]" if of_users else "[system]user;[assistant][tool]user;"
    assert prompt(template, *messages) == wanted


def test_a_role_that_no_example_shows_is_as_a_user() -> None:
    template = "{% for message in messages if message.role in ('user', 'critic') %}CONTENT{% endfor %}"
    messages = {"role": "critic", "content": "a"}, USER, {"role": "system", "content": "b"}
    assert prompt(template.replace("CONTENT", PARTS), *messages) == "[a][hi]"


@pytest.mark.parametrize("shown", ["<|python_tag|>", "Environment: ipython"])
def test_llama_3_calls_tools_whether_its_template_shows_the_mark_or_not(shown: str) -> None:
    """That of 3.2's small models has calls as bare objects, and no mark."""
    template = "{% if tools %}" + shown + "{% endif %}{{ messages[0].content }}"
    assert made(template).marks.tools == ("<|python_tag|>", "")
    assert made("{{ messages[0].content }}").marks.tools == ("", "")
