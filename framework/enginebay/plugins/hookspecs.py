"""The hooks: one that *provides* records for each kind, and a few that *observe* the engine.

Provision hooks run once when a plugin is loaded. Observation hooks run at most a few times a step and are skipped when
nobody listens. Arguments may be left out of an implementation; new ones are only ever added.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from enginebay.plugins.records import (
        AttentionRecord,
        ExecutorRecord,
        LogitsProcessorRecord,
        ModelRecord,
        QuantRecord,
        SchedulerRecord,
    )

PROJECT = "enginebay"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

#: provision hook of each kind
PROVISION_HOOKS = {
    "attention": "enginebay_attention_backends",
    "executor": "enginebay_executors",
    "model": "enginebay_models",
    "quant": "enginebay_quantizers",
    "sampler": "enginebay_logits_processors",
    "scheduler": "enginebay_schedulers",
}


@hookspec
def enginebay_attention_backends() -> Iterable[AttentionRecord]:  # type: ignore[empty-body]
    """Attention backends that this plugin provides.

    A complete plugin, ``acme_attention/__init__.py``::

        from enginebay import hookimpl
        from enginebay.plugins.records import AttentionRecord


        def make(context):
            from acme_attention.backend import AcmeBackend

            return AcmeBackend(context)


        @hookimpl
        def enginebay_attention_backends():
            return [
                AttentionRecord(
                    name="acme",
                    summary="Acme's attention kernels",
                    factory=make,
                    api_version=0,
                    dtypes=("float32",),
                    kv_dtypes=("float32",),
                )
            ]

    and in its ``pyproject.toml``::

        [project.entry-points."enginebay.attention"]
        acme = "acme_attention"

    ``acme_attention/backend.py`` subclasses `enginebay.interfaces.attention.AttentionBackend`.
    """


@hookspec
def enginebay_executors() -> Iterable[ExecutorRecord]:  # type: ignore[empty-body]
    """Executors that this plugin provides.

    A complete plugin, ``acme_executor/__init__.py``::

        from enginebay import hookimpl
        from enginebay.plugins.records import ExecutorRecord


        def make(context):
            from acme_executor.executor import AcmeExecutor

            return AcmeExecutor(context)


        @hookimpl
        def enginebay_executors():
            return [
                ExecutorRecord(name="acme", summary="Acme's processes", factory=make, api_version=0, max_world_size=1)
            ]

    and in its ``pyproject.toml``::

        [project.entry-points."enginebay.executor"]
        acme = "acme_executor"

    ``acme_executor/executor.py`` subclasses `enginebay.interfaces.executor.Executor`.
    """


@hookspec
def enginebay_models() -> Iterable[ModelRecord]:  # type: ignore[empty-body]
    """Model architectures that this plugin provides.

    A complete plugin, ``acme_lm/__init__.py``::

        from enginebay import hookimpl
        from enginebay.plugins.records import ModelRecord


        def make(context):
            from acme_lm.model import AcmeForCausalLM

            return AcmeForCausalLM(context.config, context.build)


        @hookimpl
        def enginebay_models():
            return [ModelRecord(name="AcmeForCausalLM", summary="Acme's decoder", factory=make, api_version=0)]

    and in its ``pyproject.toml``::

        [project.entry-points."enginebay.model"]
        AcmeForCausalLM = "acme_lm"

    ``acme_lm/model.py`` subclasses `enginebay.interfaces.model.CausalLM`.
    """


@hookspec
def enginebay_quantizers() -> Iterable[QuantRecord]:  # type: ignore[empty-body]
    """Quantization methods that this plugin provides.

    A complete plugin, ``acme_quant/__init__.py``::

        from enginebay import hookimpl
        from enginebay.plugins.records import QuantRecord


        def make(context):
            from acme_quant.quantizer import AcmeQuantizer

            return AcmeQuantizer.from_checkpoint(context)


        @hookimpl
        def enginebay_quantizers():
            return [
                QuantRecord(
                    name="acme",
                    summary="Acme's 4-bit weights",
                    factory=make,
                    api_version=0,
                    checkpoint_methods=("acme4",),
                )
            ]

    and in its ``pyproject.toml``::

        [project.entry-points."enginebay.quant"]
        acme = "acme_quant"

    ``acme_quant/quantizer.py`` subclasses `enginebay.interfaces.quant.Quantizer`.
    """


@hookspec
def enginebay_logits_processors() -> Iterable[LogitsProcessorRecord]:  # type: ignore[empty-body]
    """Logits processors that this plugin provides.

    A complete plugin, ``acme_sampler/__init__.py``::

        from enginebay import hookimpl
        from enginebay.plugins.records import LogitsProcessorRecord


        def make(context):
            from acme_sampler.processor import AcmeProcessor

            return AcmeProcessor(context)


        @hookimpl
        def enginebay_logits_processors():
            return [LogitsProcessorRecord(name="acme", summary="Acme's bias", factory=make, api_version=0)]

    and in its ``pyproject.toml``::

        [project.entry-points."enginebay.sampler"]
        acme = "acme_sampler"

    ``acme_sampler/processor.py`` subclasses `enginebay.interfaces.sampler.LogitsProcessor`; YAML names it in
    ``sampler: {processors: [acme]}``.
    """


@hookspec
def enginebay_schedulers() -> Iterable[SchedulerRecord]:  # type: ignore[empty-body]
    """Scheduling policies, or whole schedulers, that this plugin provides.

    A complete plugin, ``acme_sched/__init__.py``::

        from enginebay import hookimpl
        from enginebay.interfaces.scheduler import SchedulingPolicy
        from enginebay.plugins.records import SchedulerRecord


        class ShortestPromptFirst(SchedulingPolicy):
            def admission_key(self, request):
                return (request.num_prompt_tokens, request.arrival)


        @hookimpl
        def enginebay_schedulers():
            return [
                SchedulerRecord(
                    name="acme",
                    summary="shortest prompt first",
                    factory=lambda context: ShortestPromptFirst(),
                    api_version=0,
                )
            ]

    and in its ``pyproject.toml``::

        [project.entry-points."enginebay.scheduler"]
        acme = "acme_sched"
    """


@hookspec
def enginebay_engine_started(engine: Any) -> None:
    """Observe an engine that is ready to serve.

    Parameters
    ----------
    engine
        A read-only `enginebay.engine.core.EngineInfo`: the resolved configuration and the selection of every bay.

    A complete observer, ``acme_watch/__init__.py``, loaded by ``plugins: [./acme_watch/__init__.py]`` in YAML::

        from enginebay import hookimpl


        @hookimpl
        def enginebay_engine_started(engine):
            print("serving", engine.config.model)
    """


@hookspec
def enginebay_step_finished(step: Any) -> None:
    """Observe a retired step.

    Parameters
    ----------
    step
        An `enginebay.engine.core.StepInfo`: its number, requests, tokens and duration in seconds.

    A complete observer::

        from enginebay import hookimpl


        @hookimpl
        def enginebay_step_finished(step):
            print(step.index, step.num_tokens)
    """


@hookspec
def enginebay_request_finished(request: Any) -> None:
    """Observe a request that ended, whatever the reason.

    Parameters
    ----------
    request
        An `enginebay.interfaces.scheduler.RequestOutputDelta` whose ``finish_reason`` is set.

    A complete observer::

        from enginebay import hookimpl


        @hookimpl
        def enginebay_request_finished(request):
            print(request.request_id, request.finish_reason)
    """


@hookspec
def enginebay_engine_stopped(engine: Any) -> None:
    """Observe an engine that stopped; called once, also after a failure.

    A complete observer::

        from enginebay import hookimpl


        @hookimpl
        def enginebay_engine_stopped(engine):
            print("stopped")
    """
