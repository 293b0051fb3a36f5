"""Whether installed distributions meet PEP 508 requirements, from their metadata alone: nothing is imported."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement


def check_requirement(text: str) -> str:
    """What is wrong with a requirement's text; empty if it can be read."""
    try:
        Requirement(text)
    except InvalidRequirement as error:
        return f"{text!r} is not a requirement such as 'triton>=3.6': {str(error).splitlines()[0]}"
    return ""


def distribution_fault(text: str) -> str:
    """Why this environment does not meet a requirement, with the version found and the one needed; empty if it does.

    A requirement whose marker does not hold here asks for nothing. Pre-releases count as their numbers say.
    """
    requirement = Requirement(text)
    if requirement.marker is not None and not requirement.marker.evaluate():
        return ""
    needed = f"{requirement.name} {requirement.specifier}".strip()
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed, needed is {needed}"
    if requirement.specifier.contains(found, prereleases=True):
        return ""
    return f"{requirement.name} {found} is installed, needed is {needed}"
