"""``enginebay run`` and ``chat`` before a fake engine that answers in capitals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from enginebay.cli import cli
from enginebay.config import EngineConfig, LoadedConfig
from enginebay.engine.llm import LLM
from enginebay.errors import EngineDeadError
from enginebay.interfaces.scheduler import FinishReason, Request, RequestOutputDelta, SchedulerStats
from enginebay.plugins.selection import Selection
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}{{ m.content }};{% endfor %}"
REPORTED = Selection(kind="quant", wanted="auto", source="auto", chosen=None, identity=None, note="plain weights")


def make_tokenizer(template: str | None) -> Any:
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)


class FakeClient:
    """Answers a prompt with its text in capitals, one token a step."""

    def __init__(self, tokenizer: Any) -> None:
        self.info: Any = SimpleNamespace(
            vocab_size=256,
            max_model_len=64,
            eos_token_ids=(),
            selections=(REPORTED,),
            config=EngineConfig(model="m"),
        )
        self.tokenizer = tokenizer
        self.requests: list[Request] = []
        self.running: dict[str, tuple[Request, list[int]]] = {}
        self.num_shutdowns = 0
        self.before_step: Callable[[], None] = lambda: None
        self.error: str | None = None

    def add_request(self, request: Request) -> None:
        self.requests.append(request)
        answer = self.tokenizer.encode(self.tokenizer.decode(request.prompt_token_ids).upper())
        self.running[request.request_id] = (request, answer)

    def abort(self, request_ids: Iterable[str], reason: FinishReason = "abort") -> None:
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def step(self) -> list[RequestOutputDelta]:
        self.before_step()
        deltas = []
        for request, answer in list(self.running.values()):
            delta = RequestOutputDelta(request.request_id, [answer.pop(0)])
            request.output_token_ids += delta.new_token_ids
            if self.error is not None:
                delta.finish_reason, delta.error = "error", self.error
            elif not answer:
                delta.finish_reason = "stop"
            elif len(request.output_token_ids) == request.max_output_tokens:
                delta.finish_reason = "length"
            if delta.finish_reason:
                del self.running[request.request_id]
            deltas.append(delta)
        return deltas

    def has_unfinished(self) -> bool:
        return bool(self.running)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(num_running=len(self.running))

    def reset_prefix_cache(self) -> None:
        pass

    def shutdown(self) -> None:
        self.num_shutdowns += 1

    @property
    def prompts(self) -> list[str]:
        return [self.tokenizer.decode(r.prompt_token_ids) for r in self.requests]


@pytest.fixture(params=[TEMPLATE])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient(make_tokenizer(request.param))

    def start(loaded: LoadedConfig) -> LLM:
        assert loaded.config.model == "m"
        return LLM.from_client(fake, fake.tokenizer)

    monkeypatch.setattr(LLM, "from_loaded", staticmethod(start))
    return fake


@pytest.fixture
def enginebay(tmp_path: Path) -> Callable[..., Result]:
    file = tmp_path / "engine.yaml"
    file.write_text("model: m\n")

    def invoke(command: str, *args: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(cli, [command, str(file), *args], input=stdin)

    return invoke


no_template = pytest.mark.parametrize("client", [None], indirect=True)

# --- run -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["--stream", "--no-stream"])
def test_the_answer_is_all_that_goes_to_stdout(client: FakeClient, enginebay: Callable[..., Result], how: str) -> None:
    result = enginebay("run", "--prompt", "héllo", "--no-chat", how)
    assert result.exit_code == 0
    assert result.stdout == "HÉLLO\n"
    assert "plain weights" in result.stderr, "the report says which part fills each bay"
    assert client.num_shutdowns == 1


def test_several_prompts_are_answered_together_and_printed_in_order(
    client: FakeClient, enginebay: Callable[..., Result]
) -> None:
    result = enginebay("run", "--prompt", "first one", "--prompt", "2nd", "--no-chat")
    assert result.stdout == "FIRST ONE\n2ND\n"
    assert "--- 1: first one" in result.stderr
    assert len(client.requests) == 2


def test_the_template_is_used_where_there_is_one(client: FakeClient, enginebay: Callable[..., Result]) -> None:
    for args in ((), ("--chat",), ("--no-chat",)):
        assert enginebay("run", "--prompt", "hi", *args).exit_code == 0
    assert client.prompts == ["hi;", "hi;", "hi"]


@no_template
def test_without_a_template_text_is_completed(client: FakeClient, enginebay: Callable[..., Result]) -> None:
    assert enginebay("run", "--prompt", "hi").stdout == "HI\n"
    result = enginebay("run", "--prompt", "hi", "--chat")
    assert result.exit_code == 1
    assert "--prompt number 1: the model's tokenizer has no chat template" in result.stderr


def test_a_prompt_comes_from_standard_input(client: FakeClient, enginebay: Callable[..., Result]) -> None:
    result = enginebay("run", "--prompt", "-", "--no-chat", stdin="from\nstdin")
    assert result.stdout == "FROM\nSTDIN\n", result.output
    assert enginebay("run", "--prompt", "-", "--prompt", "-", stdin="x").exit_code == 2


def test_the_options_reach_the_request(client: FakeClient, enginebay: Callable[..., Result]) -> None:
    result = enginebay(
        "run", "--prompt", "abcdef", "--max-tokens", "3", "--temperature", "0.5", "--top-p", "0.9", "--seed", "7"
    )
    params = client.requests[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (3, 0.5, 0.9, 7)
    assert result.stdout == "ABC\n"
    assert "cut after 3 tokens" in result.stderr


def test_the_default_length_gives_way_and_a_given_one_does_not(
    client: FakeClient, enginebay: Callable[..., Result]
) -> None:
    assert enginebay("run", "--prompt", "a" * 60, "--no-chat").exit_code == 0
    assert client.requests[0].params.max_tokens == 4
    result = enginebay("run", "--prompt", "a" * 60, "--no-chat", "--max-tokens", "5")
    assert result.exit_code == 1
    assert "60 tokens and max_tokens=5 make 65" in result.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--prompt", "a", "--temperature", "-1"), "temperature must be at least 0"),
        (("--prompt", "a", "--top-p", "0"), "top_p must be above 0"),
        (("--prompt", "a", "--temperature", "nan"), "temperature must be"),
    ],
)
def test_wrong_parameters_are_refused_before_the_engine_starts(
    client: FakeClient, enginebay: Callable[..., Result], args: tuple[str, ...], says: str
) -> None:
    result = enginebay("run", *args)
    assert result.exit_code == 1
    assert says in result.stderr
    assert client.num_shutdowns == 0


def test_a_bad_prompt_is_named_and_the_engine_stopped(client: FakeClient, enginebay: Callable[..., Result]) -> None:
    result = enginebay("run", "--prompt", "good", "--prompt", "", "--no-chat")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "--prompt number 2: the prompt is empty" in result.stderr
    assert client.running == {}
    assert client.num_shutdowns == 1


def test_no_prompt_is_a_usage_error(client: FakeClient, enginebay: Callable[..., Result]) -> None:
    assert enginebay("run").exit_code == 2


def test_an_answer_that_failed_sets_the_exit_status(client: FakeClient, enginebay: Callable[..., Result]) -> None:
    client.error = "the device is gone"
    result = enginebay("run", "--prompt", "a")
    assert result.exit_code == 1
    assert "the device is gone" in result.stderr


# --- chat ------------------------------------------------------------------------------------------------------------


def test_a_conversation_grows_until_it_is_reset(client: FakeClient, enginebay: Callable[..., Result]) -> None:
    result = enginebay("chat", "--system", "s", stdin="a\nb\n\n/reset\nc\n/exit\nnever\n")
    assert result.exit_code == 0
    assert client.prompts == ["s;a;", "s;a;S;A;;b;", "s;c;"]
    assert "S;A;\n" in result.stdout
    assert client.num_shutdowns == 1


def test_the_end_of_the_input_leaves(client: FakeClient, enginebay: Callable[..., Result]) -> None:
    result = enginebay("chat", stdin="a\n")
    assert result.exit_code == 0
    assert client.num_shutdowns == 1


def test_ctrl_c_ends_the_answer_and_not_the_program(client: FakeClient, enginebay: Callable[..., Result]) -> None:
    """What was said before Ctrl-C stays in the conversation, and the request is gone."""
    steps = []

    def interrupt_second_step() -> None:
        steps.append(1)
        if len(steps) == 2:
            raise KeyboardInterrupt

    client.before_step = interrupt_second_step
    result = enginebay("chat", stdin="abc\nd\n")
    assert result.exit_code == 0
    assert "(interrupted)" in result.stderr
    assert client.prompts == ["abc;", "abc;A;d;"]
    assert client.running == {}


def test_ctrl_c_at_the_prompt_says_how_to_leave(
    client: FakeClient, enginebay: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[type[BaseException]] = [KeyboardInterrupt, EOFError]

    def read(_: str) -> str:
        raise answers.pop(0)

    monkeypatch.setattr("builtins.input", read)
    result = enginebay("chat")
    assert result.exit_code == 0
    assert result.stderr.count("/exit or Ctrl-D leaves") == 2


def test_a_refused_message_is_taken_back(client: FakeClient, enginebay: Callable[..., Result]) -> None:
    result = enginebay("chat", stdin=f"{'x' * 80}\nb\n/what\n")
    assert result.exit_code == 0
    assert "max_model_len is 64" in result.stderr
    assert "unknown command /what" in result.stderr
    assert client.prompts == ["b;"]


def test_a_dead_engine_ends_the_conversation(client: FakeClient, enginebay: Callable[..., Result]) -> None:
    """C48"""

    def die() -> None:
        raise EngineDeadError("device lost")

    client.before_step = die
    result = enginebay("chat", stdin="a\nb\n")
    assert result.exit_code == 1
    assert "device lost" in result.stderr
    assert client.num_shutdowns == 1


@no_template
def test_chat_without_a_template_is_refused_at_the_start(client: FakeClient, enginebay: Callable[..., Result]) -> None:
    result = enginebay("chat", stdin="a\n")
    assert result.exit_code == 1
    assert "no chat template" in result.stderr


def test_help_shows_the_defaults() -> None:
    result = CliRunner().invoke(cli, ["run", "--help"])
    assert result.exit_code == 0
    assert "--max-tokens" in click.unstyle(result.output)
