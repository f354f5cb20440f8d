"""Another checkout of cuattn in this process, under another name, so that both can be timed in turn.

`load` makes ``PATH/cuattn`` importable as ``cuattn_base``: its modules are read from there, and what they import from
``cuattn`` is taken from ``cuattn_base``.
"""

import importlib.util
import re
import sys
from importlib.machinery import FileFinder, SourceFileLoader
from types import SimpleNamespace

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
        sys.meta_path.insert(0, SimpleNamespace(find_spec=_find))
        file, folders = package / "__init__.py", [str(package)]
        loader = _Loader(ALIAS, str(file))
        spec = importlib.util.spec_from_file_location(ALIAS, file, loader=loader, submodule_search_locations=folders)
        sys.modules[ALIAS] = importlib.util.module_from_spec(spec)
        loader.exec_module(sys.modules[ALIAS])
    return sys.modules[ALIAS]


def _find(fullname, path, target=None):
    """Return where a module of the alias is, in its parent's folder; None for all others."""
    if fullname.startswith(f"{ALIAS}."):
        return FileFinder(path[0], (_Loader, [".py"])).find_spec(fullname)
    return None


class _Loader(SourceFileLoader):
    """Compiles a module with its imports renamed; never from or into a bytecode cache, which holds the other's."""

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        return compile(renamed(self.get_data(path).decode()), path, "exec")


def renamed(source):
    """Return source in which the package, its modules and what is reached through them go by the other name."""
    return re.sub(rf"\b{NAME}\b(?=\.\w|\s+(?:import|as)\b|,|$)", ALIAS, source, flags=re.MULTILINE)
