"""What is read from source: signatures and docstrings stay, what is behind them goes."""

from __future__ import annotations

import ast
from textwrap import dedent

from enginebay.reference.source import FieldText, ModuleText

SOURCE = dedent('''\
    """A bay.

    More of it.
    """

    from dataclasses import dataclass, field

    _HIDDEN = 1


    @dataclass
    class Part:
        """A part.

            def example():


                pass
        """

        #: how many,
        #: at most
        size: int
        names: dict[str, int] = field(default_factory=dict)
        _secret: int = 0
        one: int = field(default=1, hash=False)

        def __init__(self, size: int) -> None:
            # not shown
            self.size = size

        def _private(self) -> None:
            """Not shown."""

        @property
        def double(self) -> int:
            """Twice `size`."""

            def inner() -> int:
                return 2

            return inner() * self.size

        def later(
            self,
            a: int,
        ) -> None:  # noqa: B027 - empty
            """Nothing."""

        def __repr__(self) -> str:
            return "Part"


    def make(size: int) -> Part:  # type: ignore[misc]
        return Part(size)


    def _helper() -> None:
        """Not shown."""
    ''')
MODULE = ModuleText(SOURCE.splitlines(), ast.parse(SOURCE))


def test_stubs_hold_signatures_fields_and_docstrings() -> None:
    part, make = MODULE.stubs()
    assert make == "def make(size: int) -> Part: ..."
    assert part == dedent('''\
        @dataclass
        class Part:
            """A part.

                def example():


                    pass
            """

            #: how many,
            #: at most
            size: int
            names: dict[str, int] = field(default_factory=dict)
            _secret: int = 0
            one: int = field(default=1, hash=False)

            def __init__(self, size: int) -> None: ...

            @property
            def double(self) -> int:
                """Twice `size`."""

            def later(
                self,
                a: int,
            ) -> None:
                """Nothing."""''')


def test_names_choose_stubs() -> None:
    assert MODULE.stubs(["make"]) == ["def make(size: int) -> Part: ..."]


def test_fields_have_their_defaults_and_the_comment_above_them() -> None:
    assert list(MODULE.fields("Part")) == [
        FieldText("size", "int", "", "how many, at most"),
        FieldText("names", "dict[str, int]", "dict()", ""),
        FieldText("one", "int", "1", ""),
    ]


def test_the_docstring_of_a_module_is_read_without_importing_it() -> None:
    assert MODULE.docstring == "A bay.\n\nMore of it."
    assert ModuleText.of("enginebay.interfaces.attention").docstring.startswith("The attention bay:")
