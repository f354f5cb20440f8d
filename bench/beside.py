"""Another checkout of cuattn in this process, under another name, so that both can be timed in turn.

`load` makes ``PATH/cuattn`` importable as ``cuattn_base``: its modules are read from there, and what they import from
``cuattn`` is taken from ``cuattn_base``.
"""

import ast
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import SourceFileLoader

__all__ = ["ALIAS", "load"]

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
        return compile(_Renamed().visit(ast.parse(self.get_data(path), path)), path, "exec")


class _Renamed(ast.NodeTransformer):
    """Renames the package in ``import`` and ``from`` statements and in dotted names of modules."""

    def visit_ImportFrom(self, node):
        if not node.level:
            node.module = _renamed(node.module or "")
        return node

    def visit_Import(self, node):
        found = [ast.Import([ast.alias(_renamed(name.name), name.asname)]) for name in node.names]
        if any(name.name.partition(".")[0] == NAME and name.asname is None for name in node.names):
            found.append(ast.Import([ast.alias(ALIAS, NAME)]))  # the module itself goes by its own name
        return [ast.copy_location(ast.fix_missing_locations(statement), node) for statement in found]

    def visit_Constant(self, node):
        if isinstance(node.value, str) and node.value.startswith(f"{NAME}.") and node.value.replace(".", "").isalnum():
            node.value = _renamed(node.value)
        return node


def _renamed(module):
    first, dot, rest = module.partition(".")
    return (ALIAS if first == NAME else first) + dot + rest
