"""Local plugin files: ``plugins: [./my_backend.py]`` in YAML. It imports by path and hashes what it imports.

What the module provides is not known here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from enginebay.errors import PluginError
from enginebay.plugins.registration import explain


@dataclass(frozen=True)
class LocalModule:
    """An imported local plugin file."""

    module: ModuleType
    #: absolute path of the file; of a package, its ``__init__.py``
    path: Path
    #: SHA-256 of the file; of a package, of all its ``.py`` files
    sha256: str

    @property
    def module_name(self) -> str:
        """The unique name in ``sys.modules``."""
        return self.module.__name__


def import_local(reference: str, base: Path | None = None) -> LocalModule:
    """Import a plugin file, or a package by its folder or ``__init__.py``; relative paths start at `base`.

    The module's name comes from path and hash, so that two files of one name do not collide and every process gives the
    same file the same name. Importing it again returns the module that is there.
    """
    path = ((base or Path.cwd()) / Path(reference).expanduser()).resolve()
    if path.is_dir():
        path /= "__init__.py"
    if not path.is_file():
        raise PluginError(
            f"local plugin {reference!r}: there is no file {path}. Correct the path under plugins: in YAML"
        )
    if path.suffix != ".py":
        raise PluginError(f"local plugin {path}: not a .py file or a folder with an __init__.py")
    is_package = path.name == "__init__.py"
    source = path.read_bytes()
    sha256 = _package_hash(path.parent) if is_package else hashlib.sha256(source).hexdigest()
    stem = path.parent.name if is_package else path.stem
    unique = hashlib.sha256(f"{path}\0{sha256}".encode()).hexdigest()[:16]
    name = f"_enginebay_local_{unique}_{''.join(c if c.isalnum() else '_' for c in stem)}"
    if name in sys.modules:
        return LocalModule(sys.modules[name], path, sha256)
    spec = importlib.util.spec_from_file_location(
        name, path, submodule_search_locations=[str(path.parent)] if is_package else None
    )
    if spec is None:
        raise PluginError(f"local plugin {path}: Python has no way to import it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # The bytes that were hashed are the ones executed: a cached .pyc may lag behind an edit within a second.
        exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:  # a plugin may raise anything while it is imported
        del sys.modules[name]
        raise PluginError(f"local plugin {path} cannot be imported: {explain(error)}") from error
    return LocalModule(module, path, sha256)


def _package_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
