"""StructuredOutputs says which tokens keep the form that a request gave its answer: a JSON Schema, a regular
expression, a choice, a grammar. llguidance does the work: it parses what was drawn so far, and what may follow by each
token's bytes.

    form, text --grammar_of--> grammar --Constraint.after(tokens)--> a bit for each token of the vocabulary

A constraint is made of the grammar and the tokens of the answer alone, so a worker that takes over a request knows what
the one before it knew. Bits are made in a thread, on a CPU while the forward pass runs that makes the logits
(llguidance lets go of the interpreter lock); a GPU's step waits for them before it is queued. What a grammar may cost
is bounded (LIMITS).
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from threading import Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.hub import name_and_commit
from engine.sampling.json_schema import checked
from engine.types import MAX_FORM_CHARS, InvalidRequest, ModelInfo

MAX_CHOICES = 1024
SPACE = r"[\x20]?|\n[\x20\t]{0,32}"  # between JSON's tokens: a model that is lost in spaces would not end
MAX_KEPT = 128  # grammars that are kept compiled
MAX_GBNF_CHARS = 4096  # it is made into Lark by Python, in time that grows with its square
LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=50_000)
THREADS = 4
SLICE = 64  # tokens that are taken without letting others run
SCHEMAS = re.compile(r"%json\s+(?=\{)")  # in Lark's notation
OPTIONS = re.compile(r"^\s*%llguidance(.*)$", re.MULTILINE)  # a line of Lark's notation


def grammar_of(form: str, text: str) -> str:
    """llguidance's own JSON for a `json_schema`, a `regex` (of Rust's regex crate, but \\d and \\w are ASCII's, as in a
    schema's pattern), a `grammar` (Lark's notation, GBNF, or that JSON itself), or a `choice`, which is a JSON list of
    texts. Raises InvalidRequest where that can be said without a look at its meaning."""
    if len(text) > MAX_FORM_CHARS:
        raise InvalidRequest(f"structured.{form} has {len(text)} characters; give at most {MAX_FORM_CHARS}")
    try:
        match form:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(_schema(text), defaults={"whitespace_pattern": SPACE})
            case "regex":
                return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, use_ascii='dw')}/")
            case "choice":
                return LLMatcher.grammar_from_lark(_one_of(json.loads(text)))
        return text if text.lstrip().startswith("{") else LLMatcher.grammar_from_lark(_lark(_with_schemas(text)))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"structured.{form} cannot be read: {_in_a_line(error)}") from error


def _in_a_line(said: object) -> str:
    return " ".join(str(said).split())[:300]


def _schema(text: str) -> str:
    schema = json.loads(text)
    if not isinstance(schema, dict) and schema is not True:
        raise InvalidRequest("structured.json_schema is no object; give a JSON Schema")
    return "{}" if schema is True else json.dumps(checked(schema))


def _with_schemas(text: str) -> str:
    """The grammar, with the JSON Schemas in it as they are checked."""
    parts, at = list[str](), 0
    for schema in SCHEMAS.finditer(text):
        with suppress(json.JSONDecodeError):  # llguidance's to tell
            given, end = json.JSONDecoder().raw_decode(text, schema.end())
            parts += [text[at : schema.end()], json.dumps(checked(given, "structured.grammar.%json"))]
            at = end
    return "".join([*parts, text[at:]])


def _lark(text: str) -> str:
    """As Lark has it, which always has a rule `start`."""
    for line in text.splitlines():
        name, colon, _ = line.partition(":")
        if line.lstrip().startswith("%llguidance") or (colon and name.strip() == "start"):
            return text
    if len(text) > MAX_GBNF_CHARS:
        raise InvalidRequest(
            f"structured.grammar has {len(text)} characters of GBNF; give at most {MAX_GBNF_CHARS}, or Lark's notation"
        )
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # whatever it stumbles at
        raise InvalidRequest(f"structured.grammar cannot be read as GBNF: {error}"[:400]) from error


def _one_of(texts: Sequence[str]) -> str:
    if not 0 < len(texts) <= MAX_CHOICES or not all(texts):
        raise InvalidRequest(f"structured.choice has {len(texts)} texts; give 1 to {MAX_CHOICES}, none empty")
    return "start: " + " | ".join(json.dumps(text) for text in texts)


def vocabulary(tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """What a tokenizer's ids stand for, those beyond the model's, too, which it cannot draw. Takes up to a second.
    Raises InvalidRequest where that is not known."""
    try:
        with suppress(ValueError):  # it has more
            return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        return LLTokenizer(tokenizer_json, eos_token=list(eos_token_ids))
    except (ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())[:200]
        raise InvalidRequest(f"structured is given but this model's tokenizer is of no known kind: {why}") from error


def check_grammar(form: str, grammar: str, tokens: LLTokenizer) -> None:
    """Raise InvalidRequest for one that means nothing, that no text has, or that costs too much. Takes up to some 100
    ms."""
    if why := LLMatcher.validate_grammar(grammar, tokens, limits=LIMITS) or _why_none_begins(grammar, tokens):
        raise InvalidRequest(f"structured.{form} cannot be kept: {_in_a_line(why)}")


def _why_none_begins(grammar: str, tokens: LLTokenizer) -> str:
    """As a worker finds it at an answer's first token; empty: one does."""
    matcher = LLMatcher(tokens, unforced(grammar), log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    why = matcher.get_error()
    return "no text has this form; give a rule or reference that ends" if "NoExtensionBias" in why else why


def unforced(grammar: str) -> str:
    """The grammar, text that can go on in one way only left to the model like any other. llguidance would ask for the
    tokens in which a prompt would have it, and then refuse those that are added ones between angle brackets: it takes
    `<think>` for no text, whatever the tokenizer says."""
    if not grammar.lstrip().startswith("{"):
        return _unforced_lark(grammar)
    try:
        whole = json.loads(grammar)
        first, *others = whole["grammars"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return grammar  # which llguidance refuses
    if not isinstance(first, dict):
        return grammar
    if lark := first.get("lark_grammar"):
        return json.dumps(whole | {"grammars": [first | {"lark_grammar": _unforced_lark(lark)}, *others]})
    name = first.get("name") or "form"
    top = {"lark_grammar": _unforced_lark(f"start: @{name}")}
    return json.dumps(whole | {"grammars": [top, first | {"name": name}, *others]})


def _unforced_lark(text: str) -> str:
    options = OPTIONS.search(text)
    if options is None:
        return f'%llguidance {{"no_forcing": true}}\n{text}'
    try:
        given = json.loads(options[1] or "{}")
    except ValueError:
        return text
    line = f"%llguidance {json.dumps({'no_forcing': True} | given)}"
    return text[: options.start()] + line + text[options.end() :]


class StructuredOutputs:
    """Of one model's tokenizer."""

    def __init__(self, model: str, info: ModelInfo) -> None:
        """`model`: a directory, or a name on the hub."""
        self.num_bytes = -(-info.vocab_size // 8)
        self._model = model
        self._info = info
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._lock, self._reading = Lock(), Lock()
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()

    def constraint(self, grammar: str) -> Constraint:
        return Constraint(self, grammar)

    def matcher(self, grammar: str) -> LLMatcher:
        """One that has seen nothing. It is in an error state where the grammar cannot be kept."""
        with self._lock:
            known = self._kept.get(grammar)
        if known is None:  # outside the lock: others' masks need not wait for it
            known = LLMatcher(self._read(), unforced(grammar), log_level=0, limits=LIMITS)
        with self._lock:
            self._kept[grammar] = known
            self._kept.move_to_end(grammar)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return known.deep_copy()

    def _read(self) -> LLTokenizer:
        with self._reading:
            if self._vocabulary is None:
                told = _tokenizer_json(self._model)
                self._vocabulary = vocabulary(told, self._info.vocab_size, self._info.eos_token_ids)
            return self._vocabulary

    def submit(
        self, constraint: Constraint, token_ids: Sequence[int], num_guesses: int, before: Future[bytes] | None
    ) -> Future[bytes]:
        return self._threads.submit(constraint.bits_after, token_ids, num_guesses, before)


class Constraint:
    """Of one answer."""

    def __init__(self, outputs: StructuredOutputs, grammar: str) -> None:
        self.error = ""
        self._outputs = outputs
        self._grammar = grammar
        self._matcher: LLMatcher | None = None
        self._read: list[int] = []  # tokens
        self._last: Future[bytes] | None = None

    def after(self, token_ids: Sequence[int], num_guesses: int = 0) -> NextBits:
        """What may follow these, all of the answer so far; returns at once. The last ones may be guesses, which need
        not keep the form: nothing may follow one that does not."""
        self._last = self._outputs.submit(self, token_ids, num_guesses, self._last)
        return NextBits(self, self._last)

    def bits_after(self, token_ids: Sequence[int], num_guesses: int, before: Future[bytes] | None) -> bytes:
        """`before`: another's work with the same matcher, if a step was given up."""
        if before is not None:
            wait([before])
        try:
            return self._bits_after(token_ids, num_guesses)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            if num_guesses:  # which need not be true: what follows the tokens that are known is asked anew
                self._matcher, self._read = None, []
                return bytes(self._outputs.num_bytes)
            self.error = f"the answer's form cannot be kept: {error}"
            return bytes(self._outputs.num_bytes)

    def _bits_after(self, token_ids: Sequence[int], num_guesses: int) -> bytes:
        if self._matcher is None:
            self._matcher = self._outputs.matcher(self._grammar)
        self._go_back(token_ids)
        guesses = list(token_ids[max(len(self._read), len(token_ids) - num_guesses) :])
        for start in range(len(self._read), len(token_ids) - len(guesses), SLICE):
            part = list(token_ids[start : min(start + SLICE, len(token_ids) - len(guesses))])
            self._matcher.consume_tokens(part)
            self._read += part
        if guesses and self._matcher.validate_tokens(guesses) < len(guesses):
            return bytes(self._outputs.num_bytes)
        self._matcher.consume_tokens(guesses)
        self._read += guesses
        bits = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise ValueError(_in_a_line(self._matcher.get_error()))
        return bits[: self._outputs.num_bytes]

    def _go_back(self, token_ids: Sequence[int]) -> None:
        """To where these are what was read: guesses were wrong, or a step was given up."""
        assert self._matcher is not None
        read = self._read
        common = min(len(read), len(token_ids))
        while read[:common] != list(token_ids[:common]):  # the last few differ, if any
            common -= 1
        if common < len(read):
            self._matcher.rollback(len(read) - common)
            del read[common:]


class NextBits:
    """engine.types.NextTokens."""

    def __init__(self, constraint: Constraint, made: Future[bytes]) -> None:
        self._constraint = constraint
        self._made = made

    def bits(self) -> bytes:
        return self._made.result()

    @property
    def error(self) -> str:
        return self._constraint.error


def _tokenizer_json(model: str) -> str:
    path = Path(model) / "tokenizer.json"
    if path.exists():
        return path.read_text()
    from transformers import AutoTokenizer

    name, commit = name_and_commit(model)
    return str(AutoTokenizer.from_pretrained(name, revision=commit, trust_remote_code=False).backend_tokenizer.to_str())
