"""What llguidance and xgrammar make of the same schemas and answers: python grammars.py FILE, in an environment that
has both; FILE is {"model": directory, "asked": [[schema, token ids of an answer that keeps it], ...]}.

Imported by nobody. Of each: how many schemas it can keep, how many of their answers it takes, and in ms what a grammar
takes and the tokens that may follow, one answer's token after another. Prints one line of JSON.
"""

import json
import sys
import time

import llguidance
import llguidance.hf
import xgrammar
from transformers import AutoConfig, AutoTokenizer


class LlGuidance:
    def __init__(self, tokenizer, vocab_size):
        self._tokens = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size)

    def begin(self, schema):
        matcher = llguidance.LLMatcher(self._tokens, llguidance.LLMatcher.grammar_from_json_schema(schema), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def follow(self, matcher):
        matcher.compute_bitmask()

    def take(self, matcher, token):
        return matcher.consume_token(token)


class XGrammar:
    def __init__(self, tokenizer, vocab_size):
        self._compiler = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size),
            max_threads=1,
            cache_enabled=False,
        )
        self._mask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def begin(self, schema):
        return xgrammar.GrammarMatcher(self._compiler.compile_json_schema(schema, strict_mode=False))

    def follow(self, matcher):
        matcher.fill_next_token_bitmask(self._mask)

    def take(self, matcher, token):
        return matcher.accept_token(token)


def measured(library, asked, eos):
    grammars_ms, masks_ms, kept, taken = [], [], 0, 0
    for schema, ids in asked:
        began = time.perf_counter()
        try:
            matcher = library.begin(json.dumps(schema))
        except Exception:
            continue
        grammars_ms.append(1e3 * (time.perf_counter() - began))
        kept += 1
        for token in ids:
            began = time.perf_counter()
            library.follow(matcher)
            masks_ms.append(1e3 * (time.perf_counter() - began))
            if token == eos:
                taken += 1
                break
            if not library.take(matcher, token):
                break
    return {
        "schemas": len(asked),
        "kept": kept,
        "answers_taken": taken,
        "grammar_ms": shares(grammars_ms),
        "mask_ms": shares(masks_ms),
    }


def shares(times_ms):
    ordered = sorted(times_ms)
    at = {"p50": 0.5, "p99": 0.99, "most": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) for name, share in at.items()}


def main():
    with open(sys.argv[1]) as file:
        given = json.load(file)
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    vocab_size = AutoConfig.from_pretrained(given["model"]).vocab_size
    found = {
        kind.__name__.lower(): measured(kind(tokenizer, vocab_size), given["asked"], tokenizer.eos_token_id)
        for kind in (LlGuidance, XGrammar)
    }
    print(json.dumps(found))


main()
