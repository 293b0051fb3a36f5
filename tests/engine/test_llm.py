"""`LLM` before a fake engine: a deterministic client that answers a prompt with its text in capitals, then </s>."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from enginebay.config import EngineConfig, LoadedConfig
from enginebay.engine.client import EngineClient, interrupts_held
from enginebay.engine.llm import LLM
from enginebay.errors import ConfigError, EngineDeadError, RequestError, RequestTooLargeError
from enginebay.interfaces.scheduler import FinishReason, Request, RequestOutputDelta, SchedulerStats
from enginebay.sampling.params import SamplingParams
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = 256
MAX_LEN = 64
LONG = SamplingParams(max_tokens=32)


def make_tokenizer() -> Any:
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template)


TOKENIZER = make_tokenizer()


class FakeClient:
    """One token a step for each request. It keeps what it was asked for, and fails where it is told to."""

    def __init__(self) -> None:
        self.info: Any = SimpleNamespace(
            vocab_size=257,
            max_model_len=MAX_LEN,
            eos_token_ids=(EOS,),
            selections=(),
            config=EngineConfig(model="none"),
        )
        self.running: dict[str, tuple[Request, list[int]]] = {}
        self.added: list[Request] = []
        self.aborted: list[str] = []
        #: reasons of `aborted`
        self.reasons: list[str] = []
        self.num_resets = 0
        self.num_shutdowns = 0
        self.refuse: str | None = None
        self.before_step: Callable[[], None] = lambda: None

    def add_request(self, request: Request) -> None:
        text = TOKENIZER.decode(request.prompt_token_ids)
        if text == self.refuse:
            raise RequestTooLargeError("12 blocks needed, the pool has 3")
        self.added.append(request)
        self.running[request.request_id] = (request, [*TOKENIZER.encode(text.upper()), EOS])

    def abort(self, request_ids: Iterable[str], reason: FinishReason = "abort") -> None:
        for request_id in request_ids:
            self.aborted.append(request_id)
            self.reasons.append(reason)
            self.running.pop(request_id, None)

    def step(self) -> list[RequestOutputDelta]:
        self.before_step()
        return [self._token(request, answer) for request, answer in list(self.running.values())]

    def has_unfinished(self) -> bool:
        return bool(self.running)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(num_running=len(self.running))

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    def shutdown(self) -> None:
        self.num_shutdowns += 1

    def _token(self, request: Request, answer: list[int]) -> RequestOutputDelta:
        delta = RequestOutputDelta(request.request_id, [answer.pop(0)])
        request.output_token_ids += delta.new_token_ids
        if delta.new_token_ids[0] in request.stop_token_ids:
            delta.finish_reason, delta.stop_token_id = "stop", delta.new_token_ids[0]
        elif len(request.output_token_ids) == request.max_output_tokens:
            delta.finish_reason = "length"
        if delta.finish_reason:
            del self.running[request.request_id]
        return delta


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def llm(client: FakeClient) -> LLM:
    _checks: EngineClient = client
    return LLM.from_client(_checks, TOKENIZER)


# --- generate --------------------------------------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_their_prompts(llm: LLM) -> None:
    outputs = llm.generate(["a longer one", "b", {"prompt": "cc"}, {"prompt_token_ids": TOKENIZER.encode("d")}], LONG)
    assert [o.outputs[0].text for o in outputs] == ["A LONGER ONE", "B", "CC", "D"]
    assert [o.prompt for o in outputs] == ["a longer one", "b", "cc", None]
    assert all(o.finished and o.outputs[0].finish_reason == "stop" and o.outputs[0].index == 0 for o in outputs)
    assert outputs[1].outputs[0].token_ids == [*TOKENIZER.encode("B"), EOS]
    assert outputs[1].outputs[0].delta == "B"


@pytest.mark.parametrize("prompt", ["ab", {"prompt": "ab"}, {"prompt_token_ids": TOKENIZER.encode("ab")}, ["ab"]])
def test_one_prompt_may_stand_alone(llm: LLM, prompt: Any) -> None:
    assert [o.outputs[0].text for o in llm.generate(prompt)] == ["AB"]


def test_prompts_can_be_tokenised_ahead(llm: LLM) -> None:
    ids = TOKENIZER.encode("ab")
    assert llm.tokenize("ab") == {"prompt": "ab", "prompt_token_ids": ids}
    assert llm.tokenize({"prompt_token_ids": ids}) == {"prompt_token_ids": ids}


def test_no_prompts_give_no_outputs(llm: LLM, client: FakeClient) -> None:
    assert llm.generate([]) == []
    assert client.added == []


def test_parameters_are_one_or_one_each(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)]
    assert [o.outputs[0].text for o in llm.generate(["abc", "abc"], each)] == ["A", "AB"]
    assert [o.outputs[0].text for o in llm.generate(["abc", "abc"], each[0])] == ["A", "A"]
    wrong: Any = 3
    for params, says in [
        (each[:1], "2 prompt.* 1 sampling_params"),
        (wrong, "not int"),
        ([each[0], None], r"prompts\[1\]"),
    ]:
        with pytest.raises(RequestError, match=says):
            llm.generate(["abc", "abc"], params)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ("", RequestError),
        ({"prompt_token_ids": [999]}, RequestError),
        ("x" * MAX_LEN, RequestTooLargeError),
        (None, RequestError),
        ([1, 2], RequestError),
    ],
)
def test_one_bad_prompt_is_named_and_nothing_runs(llm: LLM, client: FakeClient, bad: Any, error: type) -> None:
    """The engine sees no prompt of a list that holds a bad one, and serves on."""
    with pytest.raises(error, match=r"^prompts\[1\]: "):
        llm.generate(["a", bad, "c"])
    assert client.added == []
    assert llm.generate("a")[0].outputs[0].text == "A"


def test_a_prompt_that_the_engine_refuses_takes_the_others_back(llm: LLM, client: FakeClient) -> None:
    """C21: the pool's size is known to the engine alone; what was queued before it is aborted."""
    client.refuse = "bb"
    with pytest.raises(RequestTooLargeError, match=r"^prompts\[1\]: 12 blocks"):
        llm.generate(["a", "bb", "c"])
    assert client.running == {}
    assert llm.generate("a")[0].outputs[0].text == "A"


@pytest.mark.parametrize("prompts", [None, 3, b"ab", object()])
def test_prompts_of_another_type_are_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match=type(prompts).__name__):
        llm.generate(prompts)


def test_an_error_of_one_request_is_its_own(llm: LLM, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    token = client._token

    def fail_b(request: Request, answer: list[int]) -> RequestOutputDelta:
        delta = token(request, answer)
        if request.request_id == "1" and delta.finish_reason:
            return RequestOutputDelta("1", [], finish_reason="error", error="broken")
        return delta

    monkeypatch.setattr(client, "_token", fail_b)
    good, bad = llm.generate(["a", "b"])
    assert (good.outputs[0].text, good.error) == ("A", None)
    assert (bad.outputs[0].finish_reason, bad.error) == ("error", "broken")


def test_a_progress_bar_goes_to_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], use_tqdm=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "2/2" in err


# --- chat ------------------------------------------------------------------------------------------------------------


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    hi, ho = [{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]
    assert [o.outputs[0].text for o in llm.chat(hi)] == ["HI"]
    assert [o.outputs[0].text for o in llm.chat([hi, ho])] == ["HI", "HO"]
    assert llm.chat(hi)[0].prompt == "hi"
    assert llm.chat(hi, chat_template="x{{ messages[0].content }}")[0].outputs[0].text == "XHI"


@pytest.mark.parametrize("messages", [[], [[]], "hi", ["hi"], None, [{"content": "x"}]])
def test_a_wrong_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match=r"messages|conversation"):
        llm.chat(messages)


# --- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_grows_and_its_deltas_add_up(llm: LLM) -> None:
    items = list(llm.stream("abc"))
    assert [i.outputs[0].text for i in items] == ["A", "AB", "ABC", "ABC"]
    assert "".join(i.outputs[0].delta for i in items) == "ABC"
    assert [i.finished for i in items] == [False, False, False, True]


def test_streams_and_generate_share_the_engine(llm: LLM, client: FakeClient) -> None:
    """Whoever waits serves everybody; what piled up meanwhile comes as one item."""
    first, second = llm.stream("abcdef"), llm.stream("xyz")
    assert next(first).outputs[0].text == "A"
    assert llm.generate("pqr")[0].outputs[0].text == "PQR"
    assert next(second).outputs[0].delta == "XYZ"
    assert [i.outputs[0].delta for i in first] == ["BCDE", "F", ""]
    with pytest.raises(StopIteration):
        next(second)
    assert client.running == {}


def leave(stream: Any) -> None:
    with stream:
        next(stream)


@pytest.mark.parametrize("end", [lambda s: s.close(), leave], ids=["close", "with"])
def test_a_stream_closed_early_aborts_its_request(llm: LLM, client: FakeClient, end: Callable[[Any], None]) -> None:
    """C47: a reader that leaves frees its request, and nobody else's."""
    stream, other = llm.stream("abcdef"), llm.stream("xy")
    next(stream)
    end(stream)
    end(stream) if end is not leave else None
    assert client.aborted == [stream.request_id]
    assert list(stream) == []
    assert [i.outputs[0].text for i in other][-1] == "XY"


def test_a_dropped_stream_aborts_before_the_next_step(llm: LLM, client: FakeClient) -> None:
    """C47: also one that was never read."""
    stream = llm.stream("abcdef")
    request_id = stream.request_id
    del stream
    gc.collect()
    llm.generate("a")
    assert client.aborted == [request_id]


def test_a_finished_stream_aborts_nothing(llm: LLM, client: FakeClient) -> None:
    with llm.stream("ab") as stream:
        list(stream)
    assert client.aborted == []


def test_a_stream_refuses_a_bad_prompt_at_once(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"^the prompt is empty"):
        llm.stream("")


def test_abort_ends_a_stream_with_what_there_is(llm: LLM, client: FakeClient) -> None:
    stream = llm.stream("abcdef")
    next(stream)
    llm.abort(stream.request_id)
    llm.abort("unknown")
    last = list(stream)
    assert [(i.outputs[0].text, i.outputs[0].finish_reason, i.finished) for i in last] == [("A", "abort", True)]
    assert client.aborted == [stream.request_id]


# --- stop strings and several completions ----------------------------------------------------------------------------


@pytest.mark.parametrize(("include", "text"), [(False, "AB"), (True, "ABCD")])
def test_a_stop_string_ends_the_request_in_the_engine_too(
    llm: LLM, client: FakeClient, include: bool, text: str
) -> None:
    """C42: the text of a stream is that of generate, and no item shows a part of the stop string."""
    params = SamplingParams(max_tokens=32, stop="CD", include_stop_str_in_output=include)
    [output] = llm.generate("abcdef", params)
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", "CD")
    assert completion.token_ids == TOKENIZER.encode("ABCD")
    items = [i.outputs[0] for i in llm.stream("abcdef", params)]
    assert [i.text for i in items] == ["A", "AB", "AB", text]
    assert "".join(i.delta for i in items) == text
    assert (client.aborted, client.reasons) == (["0", "1"], ["stop", "stop"])
    assert client.running == {}


def test_a_stop_string_at_the_last_token_ends_it_once(llm: LLM, client: FakeClient) -> None:
    [output] = llm.generate("abc", SamplingParams(max_tokens=3, stop=["C"]))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("AB", "stop")
    assert client.aborted == []


def test_several_completions_come_in_one_output(llm: LLM, client: FakeClient) -> None:
    outputs = llm.generate(["ab", "c"], [SamplingParams(n=3, seed=5), SamplingParams()])
    assert [[c.text for c in o.outputs] for o in outputs] == [["AB"] * 3, ["C"]]
    assert [c.index for c in outputs[0].outputs] == [0, 1, 2]
    assert [r.request_id for r in client.added] == ["0", "0-1", "0-2", "1"]
    assert [r.seed for r in client.added[:3]] == [5, 6, 7]
    assert [r.request_id for r in client.added] == ["0", "0-1", "0-2", "1"]


def test_greedy_completions_are_equal(llm: LLM) -> None:
    """vLLM refuses this; there is nothing wrong with it."""
    [output] = llm.generate("ab", SamplingParams(n=2, temperature=0.0))
    assert [c.text for c in output.outputs] == ["AB", "AB"]


def test_a_completion_that_stops_leaves_its_siblings(
    llm: LLM, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = client._token

    def differ(request: Request, answer: list[int]) -> RequestOutputDelta:
        delta = token(request, answer)
        if request.request_id == "0-1" and delta.new_token_ids == TOKENIZER.encode("B"):
            delta.new_token_ids = TOKENIZER.encode("x")
        return delta

    monkeypatch.setattr(client, "_token", differ)
    items = list(llm.stream("abcd", SamplingParams(n=2, stop="x", max_tokens=32)))
    last = items[-1].outputs
    assert [(c.text, c.stop_reason) for c in last] == [("ABCD", None), ("A", "x")]
    assert client.aborted == ["0-1"]
    for index in range(2):
        assert "".join(i.outputs[index].delta for i in items) == last[index].text


def test_a_stream_has_an_item_whenever_a_completion_grew(llm: LLM, client: FakeClient) -> None:
    stream = llm.stream("ab", SamplingParams(n=2, max_tokens=32))
    late = client.running.pop("0-1")
    assert [c.text for c in next(stream).outputs] == ["A", ""]
    client.running["0-1"] = late
    rest = list(stream)
    assert [[c.text for c in i.outputs] for i in rest] == [["AB", "A"], ["AB", "AB"], ["AB", "AB"]]
    assert [[c.finish_reason for c in i.outputs] for i in rest][-2:] == [["stop", None], ["stop", "stop"]]


@pytest.mark.parametrize("num_read", [0, 1, 2])
@pytest.mark.parametrize("how", ["close", "abort", "drop"])
def test_all_completions_end_together_in_any_state(llm: LLM, client: FakeClient, num_read: int, how: str) -> None:
    """C47: waiting, begun, and with a completion that has ended already."""
    stream = llm.stream("abc", SamplingParams(n=3, max_tokens=32))
    for _ in range(num_read):
        next(stream)
    if num_read == 2:
        client.running["0-1"][1][:] = [EOS]
        next(stream)
    if how == "close":
        stream.close()
    elif how == "abort":
        llm.abort(stream.request_id)
        assert list(stream)[-1].outputs[0].finish_reason == "abort"
    else:
        del stream
        gc.collect()
    assert llm.generate("a")[0].outputs[0].text == "A"
    assert client.aborted == (["0", "0-2"] if num_read == 2 else ["0", "0-1", "0-2"])
    assert client.running == {}


def test_a_family_is_queued_whole_or_not_at_all(llm: LLM, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    add = client.add_request

    def full(request: Request) -> None:
        if request.request_id == "0-2":
            raise RequestTooLargeError("the pool is small")
        add(request)

    monkeypatch.setattr(client, "add_request", full)
    with pytest.raises(RequestTooLargeError, match="the pool is small"):
        llm.generate("a", SamplingParams(n=4))
    assert client.running == {}
    assert llm.generate("a")[0].outputs[0].text == "A"


# --- priorities, the cache, counters ---------------------------------------------------------------------------------


def test_priorities_are_one_or_one_each(llm: LLM, client: FakeClient) -> None:
    llm.generate(["a", "b"], priority=[3, -1])
    llm.generate(["a", "b"], priority=2)
    llm.chat([{"role": "user", "content": "a"}], priority=[5])
    llm.stream("a", priority=4).close()
    llm.generate("a")
    assert [r.priority for r in client.added] == [3, -1, 2, 2, 5, 4, 0]
    wrong: Any
    for wrong, says in [
        ([1], "2 prompt.* 1 priorities"),
        ("12", "integer or a list"),
        ([0, None], r"^prompts\[1\]: pri"),
    ]:
        with pytest.raises(RequestError, match=says):
            llm.generate(["a", "b"], priority=wrong)


def test_a_salt_stays_with_a_tokenised_prompt(llm: LLM, client: FakeClient) -> None:
    prompt = llm.tokenize({"prompt": "a", "cache_salt": "s"})
    assert prompt == {"prompt": "a", "prompt_token_ids": TOKENIZER.encode("a"), "cache_salt": "s"}
    llm.generate([prompt])
    assert client.added[0].cache_extras == (("salt", "s"),)


def test_the_cache_and_the_counters_are_the_engines(llm: LLM, client: FakeClient) -> None:
    with llm.stream("ab"):
        assert llm.stats() == SchedulerStats(num_running=1)
    llm.reset_prefix_cache()
    assert client.num_resets == 1


def test_an_output_says_when_things_happened(llm: LLM) -> None:
    first, second = llm.generate(["a", "b"])
    metrics = first.metrics
    assert metrics.arrival_time == second.metrics.arrival_time
    assert metrics.first_token_time is not None
    assert metrics.last_token_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.last_token_time
    assert metrics.finished_time == metrics.last_token_time
    assert metrics.num_output_tokens == 2


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"logit_bias": {257: 1.0}}, "logit_bias holds 257"),
        ({"allowed_token_ids": (999,)}, "allowed_token_ids holds 999"),
        ({"logprobs": 258}, "logprobs=258"),
        ({"extra_args": {"x": {}}}, r"extra_args\.x"),
        ({"min_tokens": 1, "allowed_token_ids": (EOS,)}, "nothing but ids that end"),
        ({"max_tokens": None, "min_tokens": MAX_LEN}, "cannot be reached"),
        ({"bad_words": ["\ud800"]}, "bad word"),
    ],
)
def test_parameters_that_the_engine_cannot_honour_are_one_requests_error_c38(
    llm: LLM, client: FakeClient, params: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError, match=rf"^prompts\[1\]: .*{says}"):
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(**params)])
    assert client.added == []
    assert llm.generate("a")[0].outputs[0].text == "A"


# --- interrupts and death --------------------------------------------------------------------------------------------


def test_an_interrupt_lets_the_step_end_and_aborts_what_waits(llm: LLM, client: FakeClient) -> None:
    """Ctrl-C in the middle of a step: the step is whole, the requests are gone, the engine serves on."""
    reached = []

    def interrupt() -> None:
        client.before_step = lambda: None
        signal.raise_signal(signal.SIGINT)
        reached.append("end of step")

    client.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "def"])
    assert reached == ["end of step"]
    assert client.aborted == ["0", "1"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate("a")[0].outputs[0].text == "A"


def test_a_second_interrupt_is_not_held(llm: LLM, client: FakeClient) -> None:
    reached = []

    def interrupt_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append("one")
        signal.raise_signal(signal.SIGINT)
        reached.append("two")

    client.before_step = interrupt_twice
    with pytest.raises(KeyboardInterrupt):
        llm.generate("abc")
    assert reached == ["one"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_hold_nothing() -> None:
    """Python delivers signals to the main thread alone, and lets no other set a handler."""
    handlers = []

    def look() -> None:
        with interrupts_held():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_a_dead_engine_is_said_to_everybody(llm: LLM, client: FakeClient) -> None:
    """C48: the error reaches who waits, and those who come later; it is not replaced by an error of the clean-up."""
    stream = llm.stream("abc")

    def die(*_: object) -> None:
        raise EngineDeadError("device lost")

    client.before_step = die
    client.abort = die  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineDeadError, match="device lost"):
        llm.generate(["a", "b"])
    with pytest.raises(EngineDeadError, match="device lost"):
        next(stream)


def test_a_request_that_the_engine_lost_is_an_error(llm: LLM, client: FakeClient) -> None:
    """C22: nothing waits for ever."""
    client.before_step = client.running.clear
    with pytest.raises(EngineDeadError, match=r"without finishing request.* 0"):
        llm.generate("abc")


def test_shutdown_ends_everything_once(client: FakeClient) -> None:
    with LLM.from_client(client, TOKENIZER) as llm:
        stream = llm.stream("abc")
    llm.shutdown()
    assert client.num_shutdowns == 1
    uses: list[Callable[[], object]] = [
        lambda: next(stream),
        lambda: llm.generate("a"),
        lambda: llm.stream("a"),
        lambda: llm.abort("0"),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        llm.stats,
        llm.reset_prefix_cache,
    ]
    for use in uses:
        with pytest.raises(EngineDeadError, match="shut down"):
            use()
    stream.close()


# --- construction ----------------------------------------------------------------------------------------------------


def test_the_tree_is_the_yaml_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """`LLM` takes what YAML takes, over the file's values."""
    file = tmp_path / "engine.yaml"
    file.write_text("model: from-file\nscheduler: {max_num_seqs: 4}\n")
    seen: list[EngineConfig] = []

    def build(loaded: LoadedConfig) -> tuple[FakeClient, None]:
        seen.append(loaded.config)
        return FakeClient(), None

    monkeypatch.setattr("enginebay.engine.llm._build", build)
    LLM("given", config=file, scheduler={"max_num_batched_tokens": 48})
    LLM(config=file)
    assert [c.model for c in seen] == ["given", "from-file"]
    assert (seen[0].scheduler.max_num_seqs, seen[0].scheduler.max_num_batched_tokens) == (4, 48)


def test_an_unknown_keyword_is_refused_with_a_suggestion() -> None:
    """C5"""
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM("x", max_modle_len=3)


def test_without_a_tokenizer_ids_go_through(client: FakeClient) -> None:
    llm = LLM.from_client(client, None)
    output = llm.generate({"prompt_token_ids": TOKENIZER.encode("a")}, SamplingParams(detokenize=False))[0]
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [*TOKENIZER.encode("A"), EOS])
    assert llm.get_tokenizer() is None
    assert llm.info is client.info


@pytest.mark.parametrize("wrong", [5, None, ["1"]])
def test_abort_takes_an_id(llm: LLM, wrong: Any) -> None:
    with pytest.raises(RequestError, match="request_id must be a string"):
        llm.abort(wrong)


def test_threads_take_turns(llm: LLM) -> None:
    """Each thread gets its own answers, and no id is given twice."""
    wrong: list[object] = []

    def ask(word: str) -> None:
        try:
            for _ in range(20):
                output = llm.generate(word, LONG)[0]
                if output.outputs[0].text != word.upper():
                    wrong.append(output)
                if "".join(o.outputs[0].delta for o in llm.stream(word, LONG)) != word.upper():
                    wrong.append(word)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=("abcdefgh"[: n + 1],)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
