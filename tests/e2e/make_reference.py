"""Writes data/reference.json: greedy float32 tokens of SmolLM2-135M-Instruct by transformers, one prompt at a time.

    python tests/e2e/make_reference.py MODEL.gguf

transformers loads and dequantises the weights itself; only token ids are shared with the tests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from enginebay.loading.tokenizer import load_tokenizer
from enginebay.models.reference import resolve_model

MAX_TOKENS = 24
#: answers that no token ends, for a pool that must preempt: the scheduler admits with 32 tokens of headroom
LONG_TOKENS = 80
NUM_LONG = 6
OUT = Path(__file__).parent / "data" / "reference.json"

CHATS = [
    "What is the capital of France?",
    "Write a haiku about autumn.",
    "Explain photosynthesis to a child.",
    "What is 17 plus 25?",
    "List three primary colours.",
    "Who wrote Hamlet?",
    "¿Cuál es la capital de España?",
    "用一句话介绍北京。",
]
TEXTS = [
    "The",
    "Hello, my name is",
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\ndef softmax(x):\n",
    "SELECT name, age FROM users WHERE",
    "#include <stdio.h>\nint main(void) {\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "In 1969, 3 astronauts travelled 384,400 km to",
    "La tour Eiffel se trouve à",
    "Der schnelle braune Fuchs springt",
    "日本の首都は",
    "Москва является столицей",
    "مرحبا، كيف",
    "Emoji: 👩‍👩‍👧‍👦 means",
    "    indented\n\n\n\ttabs and   spaces",
    '{"name": "Ada", "born": 1815, "fields": [',
    "Q: Why is the sky blue?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics are " * 20,
    "It was the best of times, it was the worst of times. " * 40,
    " ".join(str(n) for n in range(200)),
    "x = [" + ", ".join("0" for _ in range(90)),
]


def transformers_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own reading of the GGUF file."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype).eval()


def greedy(model: Any, prompt: list[int], eos: list[int] | None, max_tokens: int = MAX_TOKENS) -> list[int]:
    """Greedy continuation of one prompt by transformers; `eos` None lets no token end it."""
    model.generation_config.eos_token_id = eos  # else `generate` falls back on the checkpoint's
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    found: list[int] = result[0, len(prompt) :].tolist()
    return found


def main(path: Path) -> None:
    """Write the file."""
    files = resolve_model(str(path))
    tokenizer = load_tokenizer(files)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": c}], add_generation_prompt=True, tokenize=False)
        for c in CHATS
    ] + TEXTS
    model = transformers_model(path)
    eos = [int(tokenizer.eos_token_id)]
    rows = []
    for text in prompts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        rows.append({"prompt": ids, "output": greedy(model, ids, eos)})
    short = [row["prompt"] for row in rows if len(row["prompt"]) < 20][:NUM_LONG]
    long = [{"prompt": ids, "output": greedy(model, ids, None, LONG_TOKENS)} for ids in short]
    reference = {"eos": eos, "max_tokens": MAX_TOKENS, "long_tokens": LONG_TOKENS, "rows": rows, "long": long}
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(reference) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
