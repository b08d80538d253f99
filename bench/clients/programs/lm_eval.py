import json
from urllib.request import Request, urlopen

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import AutoTokenizer

PAIRS = [("The capital of France is", " Paris, and the relay goes on"), ("Prefill reads", " prompts")]


def check_log_likelihoods_by_echo_are_those_of_prompt_logprobs(url, model):
    lm = LocalCompletionsAPI(
        model=model.name, base_url=url + "/v1/completions", tokenizer=str(model), tokenized_requests=True
    )
    requests = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i) for i, pair in enumerate(PAIRS)]
    for pair, (told, _) in zip(PAIRS, lm.loglikelihood(requests), strict=True):
        wanted = _scored(url, model, *pair)
        assert abs(told - wanted) < 1e-3, (pair, told, wanted)


def _scored(url, model, context, continuation):
    tokenizer = AutoTokenizer.from_pretrained(model)
    whole, before = (tokenizer.encode(text, add_special_tokens=False) for text in (context + continuation, context))
    body = json.dumps({"prompt": whole, "max_tokens": 1, "prompt_logprobs": 0}).encode()
    answer = json.load(urlopen(Request(url + "/v1/completions", body, {"Content-Type": "application/json"})))
    scores = answer["choices"][0]["prompt_logprobs"]
    return sum(scores[i][str(whole[i])]["logprob"] for i in range(len(before), len(whole)))


def check_generation_until_a_string(url, model):
    lm = LocalCompletionsAPI(model=model.name, base_url=url + "/v1/completions", tokenizer=str(model))
    arguments = ("Hi", {"until": ["\n\n"], "max_gen_toks": 8})
    [text] = lm.generate_until([Instance(request_type="generate_until", doc={}, arguments=arguments, idx=0)])
    assert text
