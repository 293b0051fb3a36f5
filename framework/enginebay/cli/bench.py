"""``enginebay bench``: throughput, latency and start of our engine or of a peer, as a table, JSON and a plot.

The table goes to standard output, the bar to standard error. It knows options and files; the measuring is
`enginebay.bench`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from enginebay.cli.options import engine_options

if TYPE_CHECKING:
    from enginebay.bench.process import EngineJob
    from enginebay.bench.workload import Workload
    from enginebay.config import LoadedConfig

_ENGINES = ("enginebay", "vllm", "transformers", "llama-cpp")
_COUNT = click.IntRange(min=1)


def _number(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number", context, parameter)
    return value


def _target(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """A file to write: its folder must be there before anything is measured."""
    if value is not None and not value.absolute().parent.is_dir():
        raise click.BadParameter(f"the folder {value.absolute().parent} does not exist", context, parameter)
    return value


def _plot_target(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and value.suffix.lower() not in (".png", ".svg"):
        raise click.BadParameter(f"{value} must end in .png or .svg", context, parameter)
    return _target(context, parameter, value)


def _file(*names: str, callback: Any, text: str) -> Callable[..., Any]:
    kind = click.Path(dir_okay=False, writable=True, path_type=Path)
    return click.option(*names, type=kind, callback=callback, metavar="FILE", help=text)


def _count(name: str, default: int, text: str, *, least: int = 1) -> Callable[..., Any]:
    return click.option(name, type=click.IntRange(min=least), default=default, show_default=True, help=text)


_SEED = click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Seed of the prompts' random tokens, and of sampling.",
)
_TEMPERATURE = click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    callback=_number,
    help="0 takes the likeliest token.",
)
_WORK = (
    _count("--input-len", 128, "Tokens of a prompt."),
    _count("--output-len", 64, "Tokens of an answer; end-of-sequence tokens do not end it."),
    _SEED,
    _count("--num-warmups", 1, "Runs before the measured ones.", least=0),
    _count("--num-iters", 3, "Measured runs."),
    _TEMPERATURE,
)
_COMMON = (
    click.option(
        "--engine", type=click.Choice(_ENGINES), default="enginebay", show_default=True, help="The engine to measure."
    ),
    click.option(
        "--peer-python",
        type=click.Path(exists=True, dir_okay=False, executable=True),
        help="Interpreter that has the peer, e.g. of an environment of its own.  [default: this one]",
    ),
    _file("--json", "json_file", callback=_target, text="Write workload, engine, versions, hardware and figures."),
    _file("--plot", "plot_file", callback=_plot_target, text="Write a plot, as .png or .svg."),
)


def _options(*options: Callable[..., Any]) -> Callable[..., Any]:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.group()
def bench() -> None:
    """Measure throughput, latency and start of an engine."""


@bench.command()
@engine_options
@_options(_count("--num-prompts", 32, "Requests, all handed over at once."), *_WORK, *_COMMON)
def throughput(loaded: LoadedConfig, num_prompts: int, **options: Any) -> None:
    """Requests and tokens a second, all requests at once.

    With --engine, a peer runs the same work: it takes the model, dtype and limits of the configuration, and what it
    cannot honour is refused.
    """
    _measure("throughput", loaded, num_prompts, {"num_prompts": num_prompts}, **options)


@bench.command()
@engine_options
@_options(_count("--batch-size", 1, "Equal requests that run together."), *_WORK, *_COMMON)
def latency(loaded: LoadedConfig, batch_size: int, **options: Any) -> None:
    """Time to the first token and between tokens, of a batch of equal requests."""
    _measure("latency", loaded, batch_size, {"batch_size": batch_size}, **options)


@bench.command()
@engine_options
@_options(
    _count("--input-len", 128, "Tokens of the prompt whose first answer token ends a start."),
    _SEED,
    _count("--num-iters", 3, "Cold starts, and warm starts."),
    _TEMPERATURE,
    *_COMMON,
)
def startup(
    loaded: LoadedConfig, input_len: int, seed: int, num_iters: int, temperature: float, **options: Any
) -> None:
    """Time from nothing to a first token, cold and warm, in fresh processes.

    Cold: the model's files are out of the page cache and caches of compiled code are empty. Warm: the start after it.
    """
    from enginebay.bench.engines import model_files_of
    from enginebay.bench.figures import startup_figures
    from enginebay.bench.show import bar
    from enginebay.bench.startup import measure_starts

    json_file, plot_file = options["json_file"], options["plot_file"]
    job = _job(loaded, options["engine"], options["peer_python"], plot_file)
    work = _random_work(loaded, 1, input_len, 1, seed, temperature)
    with bar(job.engine, 2 * num_iters) as report:
        done = iter(range(2 * num_iters))
        starts, ready = measure_starts(job, work, model_files_of(loaded), num_iters, lambda s: report(s, next(done)))
    settings = {"input_len": input_len, "seed": seed, "num_iters": num_iters, "temperature": temperature}
    data = _finish("startup", settings, job, ready, startup_figures(starts), json_file)
    if plot_file is not None:
        from enginebay.bench.plot import plot_starts

        plot_starts(plot_file, data)


def _measure(
    command: str,
    loaded: LoadedConfig,
    num_requests: int,
    counted: dict[str, int],
    *,
    engine: str,
    peer_python: str | None,
    json_file: Path | None,
    plot_file: Path | None,
    **settings: Any,
) -> None:
    from enginebay.bench.figures import latency_figures, throughput_figures
    from enginebay.bench.measure import measure
    from enginebay.bench.process import EngineProcess
    from enginebay.bench.show import bar

    job = _job(loaded, engine, peer_python, plot_file)
    work = _random_work(
        loaded, num_requests, settings["input_len"], settings["output_len"], settings["seed"], settings["temperature"]
    )
    warmups, iters = settings["num_warmups"], settings["num_iters"]
    with ExitStack() as stack:
        report = stack.enter_context(bar(engine, (warmups + iters) * work.num_output_tokens))
        report("starting", 0)
        process = stack.enter_context(EngineProcess(job, lambda part: report(f"starting, after {part}", 0)))
        runs = measure(process, work, num_warmups=warmups, num_iters=iters, progress=report)
    figures = {"throughput": throughput_figures, "latency": latency_figures}[command](work, runs)
    data = _finish(command, counted | settings, job, process.ready, figures, json_file)
    if plot_file is not None:
        from enginebay.bench.plot import plot_runs

        plot_runs(plot_file, data, runs)


def _job(loaded: LoadedConfig, engine: str, peer_python: str | None, plot_file: Path | None) -> EngineJob:
    """Everything that can be refused before an engine starts."""
    from enginebay.bench.engines import engine_job

    if peer_python is not None and engine == "enginebay":
        raise click.UsageError(
            "--peer-python is for a peer: name one with --engine; enginebay runs in this interpreter"
        )
    if plot_file is not None:
        from enginebay.bench.plot import require_matplotlib

        require_matplotlib()
    return engine_job(engine, loaded, None if peer_python is None else str(Path(peer_python).absolute()))


def _random_work(
    loaded: LoadedConfig, num_requests: int, input_len: int, output_len: int, seed: int, temperature: float
) -> Workload:
    from enginebay.bench.workload import random_workload
    from enginebay.loading.hf_config import load_hf_config
    from enginebay.models.reference import resolve_model

    vocab_size = load_hf_config(resolve_model(loaded.config.model, load_format=loaded.config.load_format)).vocab_size
    return random_workload(
        num_requests, input_len, output_len, vocab_size=vocab_size, seed=seed, temperature=temperature
    )


def _finish(
    command: str, settings: dict[str, Any], job: EngineJob, ready: Any, figures: dict[str, Any], json_file: Path | None
) -> dict[str, Any]:
    """Show the figures, and write them where that was asked."""
    from enginebay.bench.document import document, write_json
    from enginebay.bench.show import print_document

    data = document(command, settings, job, ready, figures)
    print_document(data)
    if json_file is not None:
        write_json(json_file, data)
    return data
