import asyncio
from typing import Annotated, Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field


class Point(BaseModel):
    x: Literal[1, 2, 3]
    names: Annotated[list[Literal["red", "blue"]], Field(max_length=2)]


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def chat(url, model, max_tokens=8, seed=3):
    base = url + "/v1"
    return ChatOpenAI(
        model=model.name, base_url=base, api_key="none", max_tokens=max_tokens, seed=seed, temperature=0.7
    )


def check_chat_and_stream_alike(url, model):
    whole = chat(url, model).invoke("Hi")
    parts = list(chat(url, model).stream("Hi", stream_usage=True))
    assert "".join(part.content for part in parts) == whole.content
    told = [part.usage_metadata for part in parts if part.usage_metadata]
    assert [each["total_tokens"] for each in told] == [whole.usage_metadata["total_tokens"]]


def check_several_turns_and_parts(url, model):
    parts = [HumanMessage("Hi"), AIMessage("Hello"), HumanMessage([{"type": "text", "text": "and now"}])]
    assert chat(url, model).invoke([SystemMessage("Be short"), *parts]).content


def check_batch_and_async(url, model):
    assert len(chat(url, model).batch(["a", "b", "c"])) == 3
    assert asyncio.run(chat(url, model).ainvoke("Hi")).content == chat(url, model).invoke("Hi").content


def check_tools_and_logprobs(url, model):
    assert chat(url, model).bind_tools([add]).invoke("Add 1 and 2").response_metadata["finish_reason"] == "length"
    logprobs = chat(url, model).bind(logprobs=True, top_logprobs=2).invoke("Hi").response_metadata["logprobs"]
    assert len(logprobs["content"]) == 8


def check_completion(url, model):
    plain = OpenAI(model=model.name, base_url=url + "/v1", api_key="none", max_tokens=6, seed=1)
    assert "".join(plain.stream("Hi")) == plain.invoke("Hi")


def check_structured_output(url, model):
    for seed in range(3):
        asked = chat(url, model, max_tokens=400, seed=seed)
        assert isinstance(asked.with_structured_output(Point, method="json_schema").invoke("Hi"), Point)
    said = ""
    try:
        chat(url, model).with_structured_output(Point, method="function_calling").invoke("Hi")
    except Exception as error:
        said = str(error)
    assert "the model's chat template shows no call" in said, said
