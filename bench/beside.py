"""Another checkout of cuattn in this process, under another name, so that both can be timed in turn.

`load` makes ``PATH/cuattn`` importable as ``cuattn_base``: its modules are read from there, and what they import from
``cuattn`` is taken from ``cuattn_base``.
"""

import importlib.util
import re
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import SourceFileLoader

NAME, ALIAS = "cuattn", "cuattn_base"


def load(checkout):
    """Return the package of another checkout as the module ``cuattn_base``.

    Parameters
    ----------
    checkout : Path
        Holds ``cuattn/`` and ``kernels/``.
    """
    package = checkout.resolve() / NAME
    if not (package / "__init__.py").exists():
        raise FileNotFoundError(f"{package} holds no package: expected a checkout with {NAME}/ and kernels/")
    if ALIAS not in sys.modules:
        sys.meta_path.insert(0, _Finder(package))
    return importlib.import_module(ALIAS)


class _Finder(MetaPathFinder):
    """Finds the modules of the alias below a folder."""

    def __init__(self, package):
        self._package = package

    def find_spec(self, fullname, path, target=None):
        if fullname.partition(".")[0] != ALIAS:
            return None
        place = self._package.joinpath(*fullname.split(".")[1:])
        package = place.is_dir()
        file = place / "__init__.py" if package else place.with_suffix(".py")
        if not file.exists():
            return None
        loader = _Loader(fullname, str(file))
        folders = [str(place)] if package else None
        return importlib.util.spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=folders)


class _Loader(SourceFileLoader):
    """Compiles a module with its imports renamed; never from or into a bytecode cache, which holds the other's."""

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        return compile(renamed(self.get_data(path).decode()), path, "exec")


def renamed(source):
    """Return source in which the package, its modules and what is reached through them go by the other name."""
    return re.sub(rf"\b{NAME}\b(?=\.\w|\s+(?:import|as)\b|,|$)", ALIAS, source, flags=re.MULTILINE)
