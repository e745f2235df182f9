"""Finds things by name: ours, imported when one is asked for; those registered in this process; those of installed
packages, which name them in their entry points."""

import importlib
import importlib.metadata
import os
import pathlib
import pkgutil
from collections.abc import Collection, Mapping, Sequence
from typing import Generic, TypeVar

from bertjax.common.errors import UserError

T = TypeVar("T")


def own_in(package: str, file: str, attribute: str, without: Collection[str] = ()) -> dict[str, str]:
    """Returns {name: "module:attribute"} of the modules in a package.

    Args:
      package: the dotted name of the package.
      file: the path of a module in the package.
      attribute: the name of the object in each module.
      without: the names of modules that have no such object.
    """
    names = (found.name for found in pkgutil.iter_modules([os.path.dirname(file)]))
    return {name: f"{package}.{name}:{attribute}" for name in names if name not in without}


def own_in_folders(package: str, file: str, module: str, attribute: str, renamed: Mapping[str, str]) -> dict[str, str]:
    """Returns {name: "module:attribute"} of the folders in a package that have a module of this name.

    Args:
      package: the dotted name of the package.
      file: the path of a module in the package.
      module: the name of the module, such as "family".
      attribute: the name of the object in each module.
      renamed: {folder: name} of the folders whose objects have other names.
    """
    folders = (path.parent.name for path in pathlib.Path(file).parent.glob(f"*/{module}.py"))
    return dict(sorted((renamed.get(name, name), f"{package}.{name}.{module}:{attribute}") for name in folders))


class Registry(Generic[T]):
    """Things of one kind.

    Args:
      kind: what they are, such as "task". The entry points of installed packages are in the group "bertjax.tasks".
      field: the config's field that names one.
      own: {name: "module:attribute"} of bertjax's own.
      reserved: names that the field also takes, and that stand for something else.
      plural: the plural of `kind`, if it is not `kind` + s.
      others: what an error says after the names.
      base: the class of the things; None for things of any class.
    """

    def __init__(
        self,
        kind: str,
        field: str,
        own: Mapping[str, str],
        *,
        reserved: Sequence[str] = (),
        plural: str = "",
        others: str = "",
        base: type | None = None,
    ):
        self._base = base
        self._kind, self._field, self._own, self._reserved, self._others = kind, field, own, reserved, others
        self.group = f"bertjax.{plural or kind + 's'}"
        self.registered: dict[str, T] = {}

    def register(self, name: str, thing: T) -> None:
        """Registers a thing in this process, under a name that is not one of bertjax's own."""
        if name in self._own or name in self._reserved:
            raise UserError(f"{self._kind} {name!r} is one of bertjax's own; register yours under another name")
        self.registered[name] = thing

    def names(self) -> tuple[str, ...]:
        installed = (point.name for point in importlib.metadata.entry_points(group=self.group))
        return tuple(dict.fromkeys((*self._own, *self.registered, *installed)))

    def get(self, name: str) -> T:
        """Returns the thing.

        Raises:
          UserError: for a name not in `names()`, an entry point that does not load, or a thing of another class.
        """
        thing = self._load(name)
        if self._base is not None and not isinstance(thing, self._base):
            raise UserError(
                f"config.{self._field} = {name!r}: is registered as {thing!r}; register an instance of a subclass of "
                f"{self._base.__name__}"
            )
        return thing

    def _load(self, name: str) -> T:
        if name in self.registered:
            return self.registered[name]
        if name in self._own:
            module, _, attribute = self._own[name].partition(":")
            return getattr(importlib.import_module(module), attribute)
        for point in importlib.metadata.entry_points(group=self.group, name=name):
            try:
                return point.load()
            except Exception as error:  # somebody else's code
                reason = f"{type(error).__name__}: {error}"
                raise UserError(
                    f"{self._kind} {name!r}: cannot load {point.value}, its entry point ({reason})"
                ) from None
        known = ", ".join((*self._reserved, *self.names()))
        raise UserError(f"config.{self._field} = {name!r}: choose one of {known}{self._others}")
