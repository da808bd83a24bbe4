"""Imports te-fl under Transformer Engine's module names.

as_transformer_engine() puts a finder at the front of sys.meta_path. It handles transformer_engine, its submodules, and the metadata of the
distribution transformer_engine. Each such module is a facade that imports names from te-fl on first access, so a framework is imported only when
transformer_engine.pytorch or transformer_engine.jax is.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import pathlib
import re
import sys
import types
import warnings
from typing import Any, Optional

from te_fl.compat import known_names, table
from te_fl.compat.variables import read_variables
from te_fl.errors import FailedPrecondition, Unsupported, did_you_mean

__all__ = ["as_transformer_engine", "status"]

_ROOT, _EXTENSIONS = "transformer_engine", ("transformer_engine_torch", "transformer_engine_jax")
_OLD_EXTENSION = "transformer_engine_extensions"  # before Transformer Engine 1.6
_NAMES = {module: frozenset(names.split()) for module, names in known_names.NAMES.items()}
# Transformer Engine re-exports this name in a branch for some PyTorch versions only.
_NAMES["transformer_engine.pytorch.export"] |= {"te_translation_table"}
_PACKAGES = frozenset(module.rpartition(".")[0] for module in _NAMES)
# Importing one of these modules raises ImportError if its requirement is missing; programs that support several frameworks rely on that.
_NEEDS = {"transformer_engine.pytorch": ("torch", "te_fl.pytorch"), "transformer_engine.jax": ("jax", "te_fl.jax"),
          "transformer_engine.jax.flax": ("flax", "te_fl.jax.flax")}


class Refused:
    """A placeholder for a name that te-fl does not support. It can be imported and used in isinstance() (always false); other uses raise an error.

    Deriving a class is allowed, since programs do that at import; constructing an object raises an error.
    """

    def __init__(self, name: str, way_out: str):
        self.__dict__.update(_name=name, _way_out=way_out)

    def _refuse(self) -> None:
        raise Unsupported(f"{self._name} is not supported by te-fl; {self._way_out} (docs/transformer-engine.md)")

    def __call__(self, *arguments, **options):
        self._refuse()

    def __getattr__(self, attribute: str):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        self._refuse()

    def __mro_entries__(self, bases):
        def refuse(cls, *arguments, **options):
            self._refuse()

        return (type(self._name.rpartition(".")[2], (), {"__new__": refuse}),)

    def __getitem__(self, key):
        self._refuse()

    def __instancecheck__(self, instance) -> bool:
        return False

    def __subclasscheck__(self, subclass) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<{self._name}, refused by te-fl>"


def _make_attribute(module: str, name: str) -> Any:
    """Creates an object of the class without initialising it, as copyreg.__newobj__."""
    kind = getattr(importlib.import_module(module), name)
    return kind.__new__(kind)


def _answer_by(kind: Any, name: str) -> None:
    """Changes __module__ of an nn.Module class to the Transformer Engine module that defines the name, because frameworks recognise Transformer
    Engine's layers by it. Other objects are left unchanged.

    Pickles still contain te-fl's module name, because Transformer Engine's own class could not read the pickled state.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(kind, type) or not issubclass(kind, torch.nn.Module) or kind.__module__.startswith(_ROOT + "."):
        return
    own = kind.__module__
    pytorch = [m for m, names in _NAMES.items() if m.startswith("transformer_engine.pytorch") and name in names and f"{m}.{name}" not in _NAMES]
    homes = {m: table.home(m, name) for m in pytorch}
    places = [m for m, home in homes.items() if home in sys.modules and getattr(sys.modules[home], name) is kind]

    def reduced(made: Any) -> Any:
        _, _, *state = made.__reduce_ex__(4)
        return (_make_attribute, (own, kind.__name__), *state)

    kind.__module__ = max(places, key=lambda m: m.count("."))
    copyreg.pickle(kind, reduced)


class _Missing(Unsupported, AttributeError):
    """Raised for an unknown name in one of Transformer Engine's extension modules."""


def _of_extension(module: str, name: str) -> Any:
    """te-fl's function for a name of the extension module; None if te-fl does not support it under Transformer Engine's names."""
    home = table.EXTENSION.get(module, {}).get(name)
    return None if home is None else getattr(importlib.import_module(home), name)


class _Facade(types.ModuleType):
    """A Transformer Engine module whose names come from te-fl."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Warns if a program replaces a function of Transformer Engine's, since te-fl's modules do not call it."""
        if name in _NAMES[self.__name__] and callable(value) and self.__dict__.get(name) is not value:
            warnings.warn(f"{self.__name__}.{name} was replaced: te-fl's modules do not call it, so they compute as before (docs/transformer-engine.md)",
                          stacklevel=2)
        super().__setattr__(name, value)

    def __getattr__(self, name: str):
        module = self.__name__
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if name in _NAMES[module] and f"{module}.{name}" not in _NAMES:
            home = table.home(module, name)
            refused = home is None
            value = Refused(f"{module}.{name}", table.way_out(module, name)) if refused else getattr(importlib.import_module(home), name)
            _answer_by(value, name)
            self.__dict__[name] = value
            return value
        if f"{module}.{name}" in _NAMES:
            return importlib.import_module(f"{module}.{name}")
        home, private = table.IN_PICKLES.get(module, ("", ()))
        if name in private:
            return getattr(importlib.import_module(home), name)
        found = _of_extension(module, name)
        if found is not None:
            return found
        if name in table.PRIVATE and f"{module}.{name}" == table.PRIVATE[name][0]:
            return Refused(f"{module}.{name}", table.PRIVATE[name][1])
        near = did_you_mean(name, _NAMES[module])
        raise AttributeError(f"module {module!r} of te-fl has no attribute {name!r}, nor has Transformer Engine {table.VERSION}{near}")

    def __dir__(self) -> list:
        return sorted({*super().__dir__(), *_NAMES[self.__name__]})


class _Extension(types.ModuleType):
    """transformer_engine_torch or transformer_engine_jax; te-fl provides their functions as ops."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        found = _of_extension(self.__name__, name)
        if found is not None:
            return found
        raise _Missing(f"{self.__name__}.{name} is not supported by te-fl; call the op by its name in te_fl.ops (docs/ops.md)")


class _Loader(importlib.abc.Loader):
    def create_module(self, spec):
        if spec.name == _OLD_EXTENSION:
            return None
        return (_Extension if spec.name in _EXTENSIONS else _Facade)(spec.name, f"te-fl under Transformer Engine's name {spec.name}.")

    def exec_module(self, module) -> None:
        name = module.__name__
        if name in _EXTENSIONS:
            return
        if name == _OLD_EXTENSION:
            served = importlib.import_module("te_fl.transformer_engine_torch.extensions")
            vars(module).update({own: getattr(served, own) for own in served.__all__}, __getattr__=functools.partial(_Extension.__getattr__, module))
            return
        for need in _NEEDS.get(name, ()):
            importlib.import_module(need)
        module.__all__ = [n for n in sorted(_NAMES[name]) if table.home(name, n) and f"{name}.{n}" not in _NAMES]
        if name == "transformer_engine.pytorch":  # also covers internal base classes of layers, whose names programs do not use
            for own in module.__all__:
                home = table.home(name, own)
                if home in sys.modules:
                    _answer_by(getattr(sys.modules[home], own), own)
        if name == _ROOT:
            module.__version__ = table.VERSION


class _Distribution(importlib.metadata.Distribution):
    """Metadata of the distribution transformer_engine, for programs that query its version before importing it."""

    _FILES = {"METADATA": f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {table.VERSION}\n"
                          "Summary: te-fl under Transformer Engine's name\n",
              "top_level.txt": "transformer_engine\n", "INSTALLER": "te-fl\n"}

    def read_text(self, filename: str) -> Optional[str]:
        return self._FILES.get(filename)

    def locate_file(self, path):
        return pathlib.Path(__file__).parent / path


class _Finder(importlib.abc.MetaPathFinder):
    """The finder for transformer_engine; a singleton."""

    def find_spec(self, fullname: str, path=None, target=None):
        if fullname not in (*_NAMES, *_EXTENSIONS, _OLD_EXTENSION):
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(), origin="te-fl", is_package=fullname in _PACKAGES)

    def find_distributions(self, context=importlib.metadata.DistributionFinder.Context()):
        if context.name is None or re.sub(r"[-_.]+", "-", context.name).lower() == "transformer-engine":
            yield _Distribution()


# ---- transformer_engine.plugin.core, also for a program that has another transformer_engine (te_fl.inside)

_PLUGIN = {f"{_ROOT}.plugin": None, **{f"{_ROOT}.plugin.core{part}": f"te_fl.plugin_core{part}" for part in table.PLUGIN_CORE}}


class _PluginModule(types.ModuleType):
    """A module of TransformerEngine-FL whose names are those of te-fl's module."""

    def __getattr__(self, name: str) -> Any:
        home = _PLUGIN[self.__name__]
        if home is None or name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home), name)

    def __dir__(self) -> list:
        return sorted({*super().__dir__(), *getattr(self, "__all__", ())})


class _PluginFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds te-fl's modules under TransformerEngine-FL's names. Other modules below transformer_engine.plugin, such as the backends of an installed
    TransformerEngine-FL, are found in its folder.
    """

    def find_spec(self, fullname: str, path=None, target=None):
        if fullname not in _PLUGIN:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin="te-fl", is_package=True)
        installed = _installed_elsewhere()
        if installed is not None:
            folder = pathlib.Path(installed).parent if installed.endswith(".py") else pathlib.Path(installed)
            spec.submodule_search_locations = [str(folder.joinpath(*fullname.split(".")[1:]))]
        return spec

    def create_module(self, spec):
        return _PluginModule(spec.name, f"te-fl under TransformerEngine-FL's name {spec.name}.")

    def exec_module(self, module) -> None:
        if _PLUGIN[module.__name__] is not None:
            importlib.import_module(_PLUGIN[module.__name__])


def find_plugin_core() -> None:
    """Makes transformer_engine.plugin.core importable."""
    if not any(isinstance(finder, _PluginFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PluginFinder())


_finder: Optional[_Finder] = None


def _installed_elsewhere() -> Optional[str]:
    """The location of another installed transformer_engine, found without importing it; None if there is none."""
    spec = importlib.machinery.PathFinder.find_spec(_ROOT)
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)


def status() -> dict:
    """The state of the name transformer_engine: whether it is te-fl (active), the version it reports, and the location of another installed one
    (other).
    """
    return {"active": _finder is not None and _finder in sys.meta_path, "version": table.VERSION, "other": _installed_elsewhere()}


def as_transformer_engine() -> None:
    """Makes `import transformer_engine` import te-fl: its pytorch, jax, jax.flax, common.recipe and plugin.core.

    An installed Transformer Engine is ignored; if it was imported before, this raises te_fl.errors.FailedPrecondition. The environment variable
    TE_FL_AS_TRANSFORMER_ENGINE=1 does the same when the interpreter starts.
    """
    global _finder
    there = sys.modules.get(_ROOT)
    if there is not None and not isinstance(there, _Facade):
        raise FailedPrecondition(f"te_fl.as_transformer_engine: another transformer_engine was imported from {there.__file__}; call this "
                                 "before anything imports transformer_engine, or set TE_FL_AS_TRANSFORMER_ENGINE=1")
    if _finder is None:
        _finder = _Finder()
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
        find_plugin_core()
        importlib.invalidate_caches()
    read_variables()
