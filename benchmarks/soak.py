"""A long run of random work over tiny pools: no block may leak, no request may hang, memory must stay bounded.

    python benchmarks/soak.py --minutes 30

Each round draws an engine (pool, seats, budget, policy, prefix cache, steps in flight) over a small random model with a
sliding and a full layer, and gives it random requests: lengths, priorities, seeds, penalties, stop ids, several completions
of one prompt, shared prefixes, streams that are closed or aborted in any state. Every round ends idle with all blocks back,
and every greedy request that ran to its end has the tokens that it has alone, near ties apart.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from enginebay import LLM, SamplingParams
from enginebay.engine.driver import RequestStream
from enginebay.engine.outputs import CompletionOutput

VOCAB, MAX_LEN = 96, 160
#: Log-probabilities closer than this may change places when float32 sums are taken in another order.
NEAR_TIE = 2e-6


def write_model(folder: Path) -> None:
    """The configuration of a model small enough for hundreds of steps a second; its weights are drawn at load."""
    from transformers import Qwen3Config

    Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=MAX_LEN,
        use_sliding_window=True,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
        architectures=["Qwen3ForCausalLM"],
        eos_token_id=1,
    ).save_pretrained(folder)


def engine(folder: Path, dice: random.Random | None) -> LLM:
    """An engine of random shape; without dice, the plain one that gives the reference."""
    tree: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cpu",
        "cache": {"block_size": 16, "num_blocks": 64, "prefix_caching": False},
        "scheduler": {"max_num_seqs": 1, "async_scheduling": False},
        "sampler": {"logprobs_mode": "processed_logprobs"},
    }
    if dice is not None:
        tree["cache"] = {
            "block_size": dice.choice([4, 8, 16]),
            "prefix_caching": dice.random() < 0.7,
        }
        least = 2 * -(-MAX_LEN // tree["cache"]["block_size"]) + 1
        tree["cache"]["num_blocks"] = dice.randint(least, 3 * least)
        tree["scheduler"] = {
            "policy": dice.choice(["fcfs", "priority"]),
            "max_num_seqs": dice.randint(1, 24),
            "max_num_batched_tokens": dice.choice([17, 64, 512]),
            "async_scheduling": dice.random() < 0.7,
        }
    return LLM(str(folder), **tree)


def gap_at_first_difference(found: list[int], alone: CompletionOutput) -> float:
    """How far apart the two likeliest tokens were where the answers part; 0 where they do not."""
    for index, (token, other) in enumerate(zip(found, alone.token_ids, strict=False)):
        if token != other:
            assert alone.logprobs is not None
            best = sorted((entry.logprob for entry in alone.logprobs[index].values()), reverse=True)
            return best[0] - best[1]
    return 0.0 if len(found) == len(alone.token_ids) else float("inf")


class Round:
    """One engine's life."""

    def __init__(self, llm: LLM, dice: random.Random, reference: LLM) -> None:
        self.llm, self.dice, self.reference = llm, dice, reference
        self.prefixes = [[dice.randrange(2, VOCAB) for _ in range(40)] for _ in range(3)]
        self.urgent = llm.info.config.scheduler.policy == "priority"
        self.streams: list[tuple[RequestStream, list[int], SamplingParams]] = []
        self.finished = self.closed = self.checked = self.near_ties = 0

    def submit(self) -> None:
        """Queue a random request."""
        dice = self.dice
        shared = dice.choice(self.prefixes)[: dice.randint(0, 40)] if dice.random() < 0.6 else []
        prompt = shared + [dice.randrange(2, VOCAB) for _ in range(dice.randint(1, 50))]
        greedy = dice.random() < 0.5
        params = SamplingParams(
            n=1 if dice.random() < 0.8 else dice.randint(2, 4),
            temperature=0.0 if greedy else dice.uniform(0.1, 2.0),
            top_k=dice.choice([0, 5]),
            top_p=dice.choice([1.0, 0.8]),
            repetition_penalty=dice.choice([1.0, 1.0, 1.3]),
            logprobs=dice.choice([None, None, 3]),
            min_tokens=dice.choice([0, 0, 3]),
            max_tokens=dice.randint(3, MAX_LEN - len(prompt)),
            ignore_eos=dice.random() < 0.3,
            seed=dice.choice([None, 7]),
            detokenize=False,
        )
        priority = dice.randint(-3, 3) if self.urgent else 0
        stream = self.llm.stream({"prompt_token_ids": prompt}, params, priority=priority)
        self.streams.append((stream, prompt, params))

    def advance(self) -> None:
        """Read from a random stream, or end one early."""
        index = self.dice.randrange(len(self.streams))
        stream, prompt, params = self.streams[index]
        roll = self.dice.random()
        if roll < 0.02:
            stream.close()
            self.closed += 1
        elif roll < 0.04:
            self.llm.abort(stream.request_id)
        elif roll < 0.05:
            self.streams[index] = self.streams[-1]
            self.streams.pop()
            del stream  # the collector aborts it
            return
        else:
            output = next(stream, None)
            if output is not None and not output.finished:
                return
            if output is not None:
                self.finished += 1
                self.check(prompt, params, [c.token_ids for c in output.outputs], output.outputs[0].finish_reason)
        self.streams[index] = self.streams[-1]
        self.streams.pop()

    def check(self, prompt: list[int], params: SamplingParams, tokens: list[list[int]], reason: str | None) -> None:
        """A greedy request has the tokens that it has alone."""
        if params.temperature or reason not in ("stop", "length") or self.dice.random() > 0.2:
            return
        wanted = replace(params, logprobs=2)
        alone = self.reference.generate([{"prompt_token_ids": prompt}], wanted)[0]
        for found, completion in zip(tokens, alone.outputs, strict=True):
            if (gap := gap_at_first_difference(found, completion)) > NEAR_TIE:
                raise SystemExit(
                    f"tokens differ from those alone, whose best two are {gap} apart there: {prompt} {params}\n"
                    f"{found}\n{completion.token_ids}"
                )
            self.near_ties += found != completion.token_ids
        self.checked += 1

    def run(self, requests: int) -> None:
        """Submit at random times; then let everything end."""
        left = requests
        while left or self.streams:
            if left and (not self.streams or self.dice.random() < 0.15):
                self.submit()
                left -= 1
            else:
                self.advance()
        gc.collect()
        while self.llm.stats().num_running or self.llm.stats().num_waiting or self.llm.stats().num_in_flight_steps:
            self.llm.generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=1, detokenize=False))
        stats = self.llm.stats()
        if stats.num_free_blocks != stats.num_blocks:
            raise SystemExit(f"blocks leaked: {stats}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=150, help="requests a round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for two
    start, settled = time.monotonic(), 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        reference = engine(folder, None)
        number = total = 0
        while time.monotonic() - start < 60 * arguments.minutes:
            dice = random.Random(arguments.seed * 1_000_003 + number)
            with engine(folder, dice) as llm:
                life = Round(llm, dice, reference)
                life.run(arguments.requests)
                stats, config = llm.stats(), llm.info.config
            number, total = number + 1, total + life.finished
            gc.collect()
            memory = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
            settled = memory if number == 5 else settled
            print(
                f"{(time.monotonic() - start) / 60:5.1f} min  round {number:4}  finished {life.finished:4}  "
                f"closed {life.closed:3}  compared {life.checked:3} ({life.near_ties} near ties)  "
                f"preemptions {stats.num_preemptions:4}  "
                f"cached {stats.num_prefix_hits}/{stats.num_prefix_queries}  {config.scheduler.policy:8}  "
                f"rss {memory:5.0f} MiB",
                flush=True,
            )
            if settled and memory > 1.3 * settled + 64:
                raise SystemExit(f"memory grew from {settled:.0f} to {memory:.0f} MiB")
        reference.shutdown()
    print(f"{number} rounds, {total} requests finished, no block leaked, memory bounded")


if __name__ == "__main__":
    main()
