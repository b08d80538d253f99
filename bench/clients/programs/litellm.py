import asyncio

import litellm

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def asked(url, model, provider="openai"):
    return {"model": f"{provider}/{model.name}", "api_base": url + "/v1", "api_key": "none", "max_tokens": 8, "seed": 1}


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def check_chat_and_stream_alike(url, model):
    whole = litellm.completion(**asked(url, model), **CHAT)
    parts = [*litellm.completion(stream=True, stream_options={"include_usage": True}, **asked(url, model), **CHAT)]
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content, text
    assert whole.choices[0].finish_reason == "length"
    assert parts[-1].usage.total_tokens == whole.usage.total_tokens


def check_completion_with_logprobs(url, model):
    answer = litellm.text_completion(prompt="Hi", logprobs=2, **asked(url, model, "text-completion-openai"))
    assert len(answer.choices[0].logprobs.token_logprobs) == 8


def check_several_choices_async(url, model):
    answer = asyncio.run(litellm.acompletion(n=2, logprobs=True, top_logprobs=2, **asked(url, model), **CHAT))
    assert [len(choice.logprobs.content[0].top_logprobs) for choice in answer.choices] == [2, 2]


def check_as_hosted_vllm_with_tools(url, model):
    more = {"top_k": 5, "min_p": 0.1, "tools": [TOOL], "tool_choice": "auto"}
    assert litellm.completion(**more, **asked(url, model, "hosted_vllm"), **CHAT).choices[0].message.content


def check_an_unknown_model_refused(url, model):
    said = ""
    try:
        litellm.completion(**{**asked(url, model), "model": "openai/nope"}, **CHAT)
    except litellm.NotFoundError as error:
        said = str(error)
    assert "this router serves" in said, said
