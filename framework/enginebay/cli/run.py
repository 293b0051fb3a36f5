"""``enginebay run`` and ``enginebay chat``: answers in the terminal.

Answers go to standard output; the report of parts, headings and notes go to standard error. The commands know `LLM` and
the report; they do not know how an engine is put together.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from enginebay.cli.options import engine_options
from enginebay.errors import RequestError
from enginebay.sampling.params import SamplingParams

if TYPE_CHECKING:
    from enginebay.config import LoadedConfig
    from enginebay.engine.driver import RequestStream
    from enginebay.engine.input_processor import Message, Prompt
    from enginebay.engine.llm import LLM
    from enginebay.engine.outputs import RequestOutput

#: tokens of an answer where --max-tokens is not given, if the model's length leaves room for them
_DEFAULT_MAX_TOKENS = 512
_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C ends an answer early"


def _sampling_options(temperature: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Options of how answers are drawn; each becomes a keyword argument."""
    options = [
        click.option(
            "--max-tokens",
            type=click.IntRange(min=1),
            help=f"Most tokens of an answer.  [default: {_DEFAULT_MAX_TOKENS}, or what max_model_len leaves]",
        ),
        click.option(
            "--temperature", type=float, default=temperature, show_default=True, help="0 takes the likeliest token."
        ),
        click.option("--top-p", type=float, default=1.0, show_default=True, help="Keep the likeliest tokens only."),
        click.option("--seed", type=int, help="Equal seeds give equal answers."),
    ]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.command()
@engine_options
@click.option(
    "--prompt", "prompts", multiple=True, required=True, help="What to answer; - reads standard input. May be repeated."
)
@click.option("--chat/--no-chat", "as_chat", default=None, help="Use the chat template.  [default: if there is one]")
@click.option("--stream/--no-stream", default=True, help="Print text as it comes.  [default: stream]")
@_sampling_options(temperature=0.0)
def run(loaded: LoadedConfig, prompts: tuple[str, ...], as_chat: bool | None, stream: bool, **sampling: Any) -> None:
    """Generate text for one or more prompts.

    All prompts are answered at once, and printed in their order.
    """
    texts = _read_prompts(prompts)
    SamplingParams(**_given(sampling))  # what is wrong by itself is refused before the engine starts
    with _engine(loaded) as llm:
        if as_chat is None:
            as_chat = _has_template(llm)
        with contextlib.ExitStack() as stack:
            streams = [
                stack.enter_context(_open(llm, i, text, as_chat, sampling)) for i, text in enumerate(texts, start=1)
            ]
            failed = [not _print_answer(s, i, texts, streamed=stream) for i, s in enumerate(streams, start=1)]
    if any(failed):
        raise click.exceptions.Exit(1)


@click.command()
@engine_options
@click.option("--system", help="A system message to begin the conversation with.")
@_sampling_options(temperature=0.7)
def chat(loaded: LoadedConfig, system: str | None, **sampling: Any) -> None:
    """Talk with a model in the terminal."""
    SamplingParams(**_given(sampling))
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` line editing and a history
    with _engine(loaded) as llm:
        opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        llm.chat_prompt([*opening, {"role": "user", "content": "hello"}])  # no template: said before the first line
        _note(_HELP)
        _converse(llm, opening, sampling)


def _converse(llm: LLM, opening: Sequence[Message], sampling: dict[str, Any]) -> None:
    """Read, answer, repeat, until /exit or the end of the input."""
    history = list(opening)
    while True:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt:
            _note("\n" + _HELP)
            continue
        except EOFError:
            click.echo()
            return
        if line == "/exit":
            return
        if line == "/reset":
            history = list(opening)
            _note("the conversation was forgotten")
        elif line.startswith("/"):
            _note(f"unknown command {line.split()[0]}: {_HELP}")
        elif line:
            asked = [*history, {"role": "user", "content": line}]
            try:
                answer = _answer(llm, asked, sampling)
            except RequestError as error:
                _note(f"{click.style('error:', fg='red', bold=True)} {error}; /reset begins anew")
                continue
            if answer:
                history = [*asked, {"role": "assistant", "content": answer}]


def _answer(llm: LLM, messages: Sequence[Message], sampling: dict[str, Any]) -> str:
    """Print the answer as it comes and return it, or what there is of it when Ctrl-C ends it."""
    prompt = llm.chat_prompt(messages)
    text = ""
    with llm.stream(prompt, _params(llm, prompt, sampling)) as stream:
        try:
            for output in stream:
                text = output.outputs[0].text
                click.echo(output.outputs[0].delta, nl=False)
            click.echo()
            _note_ending(output)
        except KeyboardInterrupt:
            click.echo()
            _note("(interrupted)")
    return text


# --- engine and requests ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _engine(loaded: LoadedConfig) -> Iterator[LLM]:
    """Start the engine, and say on standard error which part fills each bay."""
    from enginebay.engine.llm import LLM
    from enginebay.plugins.report import print_report

    with LLM.from_loaded(loaded) as llm:
        print_report(llm.info.selections, sys.stderr)
        yield llm


def _has_template(llm: LLM) -> bool:
    tokenizer = llm.get_tokenizer()
    return tokenizer is not None and tokenizer.chat_template is not None


def _read_prompts(prompts: Sequence[str]) -> list[str]:
    if prompts.count("-") > 1:
        raise click.UsageError("--prompt - reads all of standard input, so it can be given once only")
    return [sys.stdin.read() if p == "-" else p for p in prompts]


def _open(llm: LLM, number: int, text: str, as_chat: bool, sampling: dict[str, Any]) -> RequestStream:
    try:
        prompt = llm.chat_prompt([{"role": "user", "content": text}]) if as_chat else llm.tokenize(text)
        return llm.stream(prompt, _params(llm, prompt, sampling))
    except RequestError as error:
        raise type(error)(f"--prompt number {number}: {error}") from error


def _params(llm: LLM, prompt: Prompt, sampling: dict[str, Any]) -> SamplingParams:
    """The options as parameters; a default length gives way to ``max_model_len``, a given one does not."""
    given = _given(sampling)
    if "max_tokens" not in given:
        room = llm.info.max_model_len - len(llm.tokenize(prompt)["prompt_token_ids"])
        given["max_tokens"] = max(1, min(_DEFAULT_MAX_TOKENS, room))
    return SamplingParams(**given)


def _given(sampling: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sampling.items() if value is not None}


# --- output ----------------------------------------------------------------------------------------------------------


def _print_answer(stream: RequestStream, number: int, texts: Sequence[str], *, streamed: bool) -> bool:
    """Print one answer, under its prompt where there are several; return whether it succeeded."""
    if len(texts) > 1:
        _note(click.style(f"--- {number}: {texts[number - 1]}", bold=True))
    for output in stream:
        if streamed:
            click.echo(output.outputs[0].delta, nl=False)
    click.echo("" if streamed else output.outputs[0].text)
    return _note_ending(output)


def _note_ending(output: RequestOutput) -> bool:
    """Say on standard error why an answer ended, where it is not the model's own end; return whether it succeeded."""
    completion = output.outputs[0]
    if completion.finish_reason == "length":
        _note(f"(cut after {len(completion.token_ids)} tokens; --max-tokens sets the most)")
    if output.error is not None:
        _note(f"{click.style('error:', fg='red', bold=True)} {output.error}")
    return output.error is None


def _note(text: str) -> None:
    click.echo(text, err=True)
