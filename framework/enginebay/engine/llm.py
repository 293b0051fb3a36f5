"""`LLM`: the engine behind Python calls, reading as vLLM's does.

It knows prompts, outputs and the engine's client; it knows nothing of plugins, devices or steps. Whoever waits (a
`generate`, or a stream's ``next``) advances the engine for everybody, so calls and open streams may be interleaved
freely; threads take turns at the engine, a step each.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from enginebay.engine.client import EngineClient, InprocClient
from enginebay.engine.detokenizer import Detokenizer
from enginebay.engine.driver import Driver, RequestStream
from enginebay.engine.family import family
from enginebay.engine.input_processor import ChatTokenizer, InputProcessor, Message, Prompt, TokensPrompt
from enginebay.engine.output_processor import OutputProcessor
from enginebay.engine.outputs import RequestOutput
from enginebay.engine.request_checks import processors_of
from enginebay.engine.request_state import RequestState
from enginebay.errors import RequestError
from enginebay.interfaces.scheduler import SchedulerStats
from enginebay.sampling.params import SamplingParams

if TYPE_CHECKING:
    from enginebay.config import LoadedConfig
    from enginebay.engine.core import EngineInfo


class LLM:
    """An engine in this process.

    Parameters
    ----------
    model
        A folder, a ``.gguf`` file, a hub id or a packaged name; overrides the YAML file's.
    config
        An ``engine.yaml``.
    **tree
        The same tree as in YAML, e.g. ``scheduler={"max_num_seqs": 8}``; overrides the file, key by key.

    Examples
    --------
    ::

        with LLM("smollm2-135m-instruct") as llm:
            for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
                print(output.outputs[0].text)
    """

    def __init__(self, model: str | Path | None = None, *, config: str | Path | None = None, **tree: Any) -> None:
        from enginebay.config import load_config

        overrides = tree if model is None else {"model": str(model), **tree}
        self._start(*_build(load_config(config, overrides)))

    @classmethod
    def from_loaded(cls, loaded: LoadedConfig) -> Self:
        """Start the engine of a configuration that is loaded already."""
        return cls.from_client(*_build(loaded))

    @classmethod
    def from_client(cls, client: EngineClient, tokenizer: ChatTokenizer | None) -> Self:
        """Put the front before an engine that runs already."""
        llm = cls.__new__(cls)
        llm._start(client, tokenizer)
        return llm

    def _start(self, client: EngineClient, tokenizer: ChatTokenizer | None) -> None:
        info = client.info
        self._client = client
        self._tokenizer = tokenizer
        #: ids are counted, and a tokenizer is used, by one thread at a time
        self._input_lock = threading.RLock()
        self._inputs = InputProcessor(
            tokenizer,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            eos_token_ids=info.eos_token_ids,
            processors=processors_of(info.selections),
        )
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer.backend_tokenizer)
        self._driver = Driver(client, OutputProcessor(detokenizer, info.eos_token_ids))

    @property
    def info(self) -> EngineInfo:
        """The resolved configuration, the part in each bay, and the engine's limits."""
        return self._client.info

    def get_tokenizer(self) -> ChatTokenizer | None:
        """The transformers tokenizer; None where the model has none."""
        return self._tokenizer

    # --- requests ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer prompts and return the outputs in their order.

        Parameters
        ----------
        prompts
            A string, ``{"prompt": str}``, ``{"prompt_token_ids": [int, …]}``, or a list of these. A dictionary may hold
            ``"cache_salt": str``: then it shares cached prefixes only with prompts of the same salt.
        sampling_params
            One for all prompts, or one each; default `SamplingParams`. With ``n`` above 1 an output holds so many
            completions, also at temperature 0, where they are equal (vLLM refuses that).
        priority
            Smaller is more urgent; one for all prompts, or one each. Only policies that order by it take any but 0.
        use_tqdm
            Show a progress bar on standard error (the name is vLLM's).

        Raises
        ------
        RequestError
            A prompt or its parameters are wrong; the message names its index, and no prompt was run.
        EngineDeadError
            The engine stopped.

        A request that the engine gives up midway comes back with finish_reason ``"error"`` and `RequestOutput.error`.
        Ctrl-C, or any other error, aborts what is unfinished; the engine can serve on.
        """
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]
        if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
            raise RequestError(f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}")
        self._driver.check_running()
        states: list[RequestState] = []
        try:
            states += self._submit(prompts, sampling_params, priority)
            with _progress(states, shown=use_tqdm) as report:
                waiting = list(states)
                while waiting:
                    if waiting[-1].finished:
                        waiting.pop()
                    else:
                        self._driver.advance()
                        report()
        finally:
            self._driver.abort(s.request_id for s in states if not s.finished)
        return [state.read() for state in states]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of them, rendered with the model's chat template or `chat_template`.

        Raises `RequestError` where there is no template, or it refuses the messages; otherwise as `generate`.
        """
        prompts = [
            self.chat_prompt(c, add_generation_prompt=add_generation_prompt, chat_template=chat_template)
            for c in _conversations(messages)
        ]
        return self.generate(prompts, sampling_params, priority=priority, use_tqdm=use_tqdm)

    def chat_prompt(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, chat_template: str | None = None
    ) -> TokensPrompt:
        """Render one conversation into a prompt for `generate` or `stream`."""
        return self._inputs.chat_prompt(
            messages, add_generation_prompt=add_generation_prompt, chat_template=chat_template
        )

    def tokenize(self, prompt: Prompt) -> TokensPrompt:
        """Check a prompt of any form and bring it into ids, e.g. to count them."""
        processed = self._inputs.parse(prompt)
        ids: TokensPrompt = {"prompt_token_ids": processed.token_ids.tolist()}
        if processed.text is not None:
            ids["prompt"] = processed.text
        if processed.cache_salt is not None:
            ids["cache_salt"] = processed.cache_salt
        return ids

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> RequestStream:
        """Queue one prompt and return an iterator over its output as it grows.

        Each item holds everything so far in ``outputs[i].text``, and what is new since the item before in ``.delta``;
        the deltas add up to the text. There is an item whenever any completion grew or ended. Closing the iterator,
        leaving its ``with`` block, or dropping it, aborts the request.
        """
        self._driver.check_running()
        return RequestStream(self._driver, self._submit([prompt], sampling_params, priority)[0])

    def abort(self, request_id: str) -> None:
        """End a request early, all completions of it: its stream ends with finish_reason ``"abort"``.

        Unknown and finished ids are ignored.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, as RequestOutput.request_id is, not {request_id!r:.80}")
        self._driver.check_running()
        self._driver.abort([request_id])

    # --- the engine --------------------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """What waits and runs, the pool's blocks, preemptions and prefix cache hits, as of now."""
        return self._driver.stats()

    def reset_prefix_cache(self) -> None:
        """Let no later prompt find what is cached now. What runs goes on undisturbed."""
        self._driver.reset_prefix_cache()

    # --- life cycle --------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Stop the engine and free its device. Open streams end with `EngineDeadError`; a second call does nothing."""
        self._driver.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _submit(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
    ) -> list[RequestState]:
        """Queue all prompts, or none: everything is checked before the first enters the engine."""
        arrival_time, count = time.monotonic(), len(prompts)
        params, priorities = _params_of_each(sampling_params, count), _priority_of_each(priority, count)
        requests = []
        for index in range(count):
            with _naming(index, count), self._input_lock:
                requests.append(self._inputs.process(prompts[index], params[index], priorities[index]))
        prefix_caching = self.info.config.cache.prefix_caching
        states: list[RequestState] = []
        try:
            for index, (request, processed) in enumerate(requests):
                with _naming(index, count):
                    members = family(request, prefix_caching=prefix_caching)
                    states.append(self._driver.add(members, processed.text, arrival_time))
        except BaseException:
            self._driver.abort(s.request_id for s in states)
            raise
        return states


def _build(loaded: LoadedConfig) -> tuple[EngineClient, ChatTokenizer | None]:
    from enginebay.engine.assembly import build_engine

    core, tokenizer = build_engine(loaded)
    return InprocClient(core), tokenizer


def _params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, Sequence):
        raise RequestError(f"sampling_params must be SamplingParams or a list of them, not {type(params).__name__}")
    if len(params) != num_prompts:
        raise RequestError(
            f"{num_prompts} prompt(s) came with {len(params)} sampling_params: give one, or one a prompt"
        )
    return params


def _priority_of_each(priority: int | Sequence[int] | None, num_prompts: int) -> Sequence[int]:
    """The priorities; what each may be is checked with its prompt."""
    if priority is None or isinstance(priority, int):
        return [0 if priority is None else priority] * num_prompts
    if not isinstance(priority, Sequence) or isinstance(priority, str | bytes | bytearray):
        raise RequestError(f"priority must be an integer or a list of them, not {priority!r:.80}")
    if len(priority) != num_prompts:
        raise RequestError(f"{num_prompts} prompt(s) came with {len(priority)} priorities: give one, or one a prompt")
    return priority


def _conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> Sequence[Sequence[Message]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f"messages must be a list of dictionaries, or a list of such lists, not {messages!r:.80}")
    if all(isinstance(m, Sequence) and not isinstance(m, str | bytes) for m in messages) and messages:
        return messages  # type: ignore[return-value] # the check above tells the two forms apart
    return [messages]  # type: ignore[list-item]


@contextlib.contextmanager
def _naming(index: int, count: int) -> Iterator[None]:
    """Let a request's error say which of several prompts it is about."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise type(error)(f"prompts[{index}]: {error}") from error


@contextlib.contextmanager
def _progress(states: Sequence[RequestState], *, shown: bool) -> Iterator[Callable[[], None]]:
    """Yield a function that brings the bar up to date."""
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = [*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=len(states))
        yield lambda: bar.update(task, completed=sum(state.finished for state in states))
