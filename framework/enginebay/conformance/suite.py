"""What the classes of all kinds share: which plugin is tried, on what, and where a law's cases come from.

It imports no torch and knows no kind's laws.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import pytest

from enginebay.conformance.claims import NOT_INSTALLED
from enginebay.errors import PluginError
from enginebay.plugins.catalogue import Catalogue
from enginebay.plugins.identity import PluginIdentity
from enginebay.plugins.loader import PluginLoader
from enginebay.plugins.records import Kind, Record
from enginebay.plugins.requirements import Hardware, Reason, Requirements
from enginebay.plugins.suggest import did_you_mean

Level = Literal["core", "full"]
Function = TypeVar("Function", bound=Callable[..., Any])

_CASES = "_enginebay_cases"
#: codes of reasons that speak of the machine and not of the model
NOT_HERE = ("capability", "device", *NOT_INSTALLED)


@dataclass(frozen=True)
class Settings:
    """How a run was asked for."""

    #: device type that parts run on
    device: str = "cpu"
    #: ``"core"``: within a minute on a small machine; ``"full"``: sizes as they are met in use
    level: Level = "core"
    #: all combinations of features instead of all pairs
    exhaustive: bool = False

    @classmethod
    def of(cls, config: pytest.Config) -> Settings:
        """From pytest's command line (`enginebay.conformance.pytest_plugin`)."""
        return cls(
            device=config.getoption("enginebay_device"),
            level=config.getoption("enginebay_level"),
            exhaustive=config.getoption("enginebay_exhaustive"),
        )


def cases_from(method: str) -> Callable[[Function], Function]:
    """Mark a law as one to be tried on each ``case`` that a class method of that name gives.

    The method takes the record and the `Settings`, and returns cases whose `str` tells them apart.
    """

    def mark(law: Function) -> Function:
        setattr(law, _CASES, method)
        return law

    return mark


class Conformance:
    """Base of each kind's class. A subclass names the plugin that it tries; every ``test_`` method is a law.

    A law that a plugin is known to break is declared in its record (`Record.known_failures`) and nowhere else: replacing a
    law in a subclass is refused when tests are collected.
    """

    kind: ClassVar[Kind]
    #: the plugin's name, as YAML writes it
    plugin: ClassVar[str] = ""
    #: the plugin file that provides it, where it is not installed
    local: ClassVar[str] = ""
    #: laws of which a case must have passed before a plugin is said to pass: those that run the part
    decisive: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def load_record(cls) -> tuple[Record, PluginIdentity | None]:
        """The record that is tried and whose it is, by the same door as the engine's."""
        loader = PluginLoader(Catalogue.discover())
        if cls.local:
            loader.add_local(cls.local)
        if not cls.plugin:
            raise PluginError(f"{cls.__name__} names no plugin; set plugin = ... to the name written in YAML")
        loaded = loader.load(cls.kind, cls.plugin)
        return loaded.record, loaded.identity

    @classmethod
    @functools.cache
    def tried(cls) -> tuple[Record, PluginIdentity | None]:
        """What `load_record` gives, loaded once a class."""
        return cls.load_record()

    @classmethod
    @functools.cache
    def refusals(cls, settings: Settings) -> tuple[Reason, ...]:
        """Why the plugin cannot be run here at all: another device is needed, or a library is missing."""
        return refused_here(cls.tried()[0], hardware(settings.device))

    @pytest.fixture
    def settings(self, request: pytest.FixtureRequest) -> Settings:
        """How the run was asked for."""
        return Settings.of(request.config)

    @pytest.fixture
    def record(self) -> Any:
        """The record that is tried."""
        return self.tried()[0]

    @pytest.fixture
    def runs_here(self, settings: Settings) -> None:
        """Skip what has to run the part, where it cannot be run."""
        if reasons := self.refusals(settings):
            pytest.skip(f"not on this machine: {'; '.join(map(str, reasons))}")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give a law its cases."""
        method = getattr(metafunc.function, _CASES, None)
        if method is None:
            return
        settings, record = Settings.of(metafunc.config), self.tried()[0]
        if reasons := self.refusals(settings):
            _nothing_to_try(metafunc, f"not on this machine: {'; '.join(map(str, reasons))}")
            return
        cases: Sequence[Any] = getattr(self, method)(record, settings)
        if not cases:
            _nothing_to_try(metafunc, "the record declares nothing that this law is about")
            return
        metafunc.parametrize("case", cases, ids=[str(case) for case in cases])


def refused_here(record: Record, device: Hardware) -> tuple[Reason, ...]:
    """Reasons of `record` against `device`, whatever else is asked of it."""
    reasons = record.supports(Requirements(hardware=device, dtype="float32", kv_dtype="float32")).reasons
    return tuple(reason for reason in reasons if reason.code in NOT_HERE)


def _nothing_to_try(metafunc: pytest.Metafunc, reason: str) -> None:
    metafunc.parametrize("case", [pytest.param(None, marks=pytest.mark.skip(reason=reason), id="none")])


@functools.cache
def hardware(device: str) -> Hardware:
    """The device that a run was asked for."""
    from enginebay.engine.hardware import detect

    return detect(device)


def laws(suite: type[Conformance]) -> dict[str, Callable[..., Any]]:
    """The laws of a kind by name, without the ``test_``, as the kind's own class has them."""
    own = kind_class(suite)
    return {name.removeprefix("test_"): getattr(own, name) for name in dir(own) if name.startswith("test_")}


def kind_class(suite: type[Conformance]) -> type[Conformance]:
    """The class of the kind that an author's class is derived from."""
    return [base for base in suite.__mro__ if issubclass(base, Conformance) and base is not Conformance][-1]


def law_name(item: pytest.Item) -> str:
    """The law that a collected test is a case of."""
    return str(getattr(item, "originalname", item.name)).removeprefix("test_")


def law_faults(suite: type[Conformance]) -> list[str]:
    """What is wrong with a class: laws that it replaces, and known failures of laws that there are not."""
    record, known = suite.tried()[0], laws(suite)
    where = f"{suite.__module__}.{suite.__qualname__}"
    faults = [
        f"{where} replaces the law {law!r}; declare what a plugin cannot keep in its record's known_failures, with the reason"
        for law in known
        if getattr(suite, f"test_{law}") is not getattr(kind_class(suite), f"test_{law}")
    ]
    faults += [
        f"{where}: known_failures of {record.kind}:{record.name} names {law!r}, which is no law of its kind."
        f"{did_you_mean(law, known)}"
        for law in record.known_failures
        if law not in known
    ]
    return faults
