"""llama.cpp's converter, for a model whose tokenizer it does not know: python to_gguf.py SOURCES MODEL [ITS OPTIONS].

It knows a byte-level BPE by the hash of a sentence's tokens, and refuses any other. The benchmarks' model has one that
was trained on other text, and splits text as GPT-2's does.
"""

import sys

sources = sys.argv.pop(1)
sys.path.insert(0, sources)

import convert_hf_to_gguf  # noqa: E402
from conversion.base import TextModel  # noqa: E402

TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
convert_hf_to_gguf.main()
