import openai

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "seed": 1}


def client(url):
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


def check_models(url, model):
    assert client(url).models.retrieve(client(url).models.list().data[0].id).id == model.name


def check_chat_and_stream_alike(url, model):
    whole = client(url).chat.completions.create(model=model.name, **CHAT)
    parts = client(url).chat.completions.create(
        model=model.name, stream=True, stream_options={"include_usage": True}, **CHAT
    )
    *parts, last = parts
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert last.usage == whole.usage


def check_events_of_a_stream(url, model):
    with client(url).chat.completions.stream(model=model.name, logprobs=True, **CHAT) as stream:
        kinds = {event.type for event in stream}
    assert {"content.delta", "content.done", "logprobs.content.done"} <= kinds, kinds


def check_completions_of_prompts(url, model):
    answer = client(url).completions.create(model=model.name, prompt=["a", "b"], max_tokens=3, n=2, echo=True)
    assert [choice.text[0] for choice in answer.choices] == ["a", "a", "b", "b"]


def check_errors(url, model):
    for call, kind in (
        (lambda: client(url).models.retrieve("nope"), openai.NotFoundError),
        (lambda: client(url).embeddings.create(model=model.name, input="x"), openai.NotFoundError),
        (lambda: client(url).chat.completions.create(model=model.name, n=0, **CHAT), openai.BadRequestError),
    ):
        said = None
        try:
            call()
        except kind as error:
            said = error.body
        assert said["message"]


def check_a_deadline_of_its_own(url, model):
    try:
        hasty = client(url).with_options(timeout=0.01)
        hasty.chat.completions.create(model=model.name, **{**CHAT, "max_tokens": 500})
    except openai.APITimeoutError:
        return
    raise AssertionError("no error")
