"""Work for an engine: prompts as random token ids, and how many tokens each answer has. It knows no engine."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests that are handed over at once; every answer has exactly its length, whatever the model says."""

    prompts: list[list[int]]
    #: tokens of each answer
    lengths: list[int]
    #: 0 takes the likeliest token
    temperature: float = 0.0
    #: seed of sampling; request i has seed + i where an engine has a seed a request
    seed: int = 0

    @property
    def num_input_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(self.lengths)

    def line(self) -> dict[str, Any]:
        """What `enginebay.bench.driver` reads."""
        return {
            "prompts": self.prompts,
            "lengths": self.lengths,
            "temperature": self.temperature,
            "seed": self.seed,
        }


def random_workload(
    num_prompts: int, input_len: int, output_len: int, *, vocab_size: int, seed: int, temperature: float = 0.0
) -> Workload:
    """`num_prompts` prompts of `input_len` ids below `vocab_size`: equal arguments give equal ids on every machine."""
    source = random.Random(seed)
    prompts = [[source.randrange(vocab_size) for _ in range(input_len)] for _ in range(num_prompts)]
    return Workload(prompts=prompts, lengths=[output_len] * num_prompts, temperature=temperature, seed=seed)
