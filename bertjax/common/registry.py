"""Registries of objects by name.

A registry has the objects of bertjax, which are imported on use; objects that were registered in this process; and
objects of installed packages, which name the objects in entry points.
"""

import importlib.metadata
import os
import pathlib
import pkgutil
from collections.abc import Collection, Mapping, Sequence
from typing import Generic, TypeVar, cast

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
    names = (module.name for module in pkgutil.iter_modules([os.path.dirname(file)]))
    return {name: f"{package}.{name}:{attribute}" for name in names if name not in without}


def own_in_folders(package: str, file: str, module: str, attribute: str, renamed: Mapping[str, str]) -> dict[str, str]:
    """Returns {name: "module:attribute"} of the folders in a package that have a module with a certain name.

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
    """Objects of one kind by name: objects of bertjax, objects of `register`, and entry points of installed packages.

    Args:
      kind: the kind, such as "task". The entry points of installed packages are then in the group "bertjax.tasks".
      field: the config field that names an object.
      builtin: {name: "module:attribute"} of the objects of bertjax.
      reserved: further values of the field, which name no object of the registry.
      plural: the plural of `kind`, if it is not `kind` + s.
      hint: the end of the list of names in an error message.
      base: the class of the objects; None for objects of any class.
    """

    def __init__(
        self,
        kind: str,
        field: str,
        builtin: Mapping[str, str],
        *,
        reserved: Sequence[str] = (),
        plural: str = "",
        hint: str = "",
        base: type | None = None,
    ) -> None:
        self._base = base
        self._kind, self._field, self._builtin, self._reserved, self._hint = kind, field, builtin, reserved, hint
        self.group = f"bertjax.{plural or kind + 's'}"
        self.registered: dict[str, T] = {}

    def register(self, name: str, entry: T) -> None:
        """Registers an object in this process. An object that was registered under the same name is replaced.

        Args:
          name: the name, a value of the config field.
          entry: the object.

        Raises:
          UserError: if the name belongs to an object of bertjax, or is reserved.
        """
        if name in self._builtin or name in self._reserved:
            raise UserError(f"{self._kind} {name!r} is a name of bertjax; register the object under another name")
        self.registered[name] = entry

    def names(self) -> tuple[str, ...]:
        """Returns the names of all objects: of bertjax, then registered objects, then entry points."""
        installed = (point.name for point in importlib.metadata.entry_points(group=self.group))
        return tuple(dict.fromkeys((*self._builtin, *self.registered, *installed)))

    def get(self, name: str) -> T:
        """Returns the object with a name, and imports its module if necessary.

        Args:
          name: the name. A registered object takes precedence over an entry point with the same name.

        Raises:
          UserError: if `names()` does not contain the name, if an entry point does not load, or if the object is not an
            instance of the class `base`.
        """
        entry = self._load(name)
        if self._base is not None and not isinstance(entry, self._base):
            raise UserError(
                f"config.{self._field} = {name!r}: is registered as {entry!r}; register an instance of a subclass of "
                f"{self._base.__name__}"
            )
        return entry

    def _load(self, name: str) -> T:
        if name in self.registered:
            return self.registered[name]
        if name in self._builtin:
            return cast(T, pkgutil.resolve_name(self._builtin[name]))
        for point in importlib.metadata.entry_points(group=self.group, name=name):
            try:
                return cast(T, point.load())
            except Exception as error:  # the code of the package may raise any error
                raise UserError(
                    f"{self._kind} {name!r}: cannot load {point.value}, its entry point "
                    f"({type(error).__name__}: {error})"
                ) from None
        known = ", ".join((*self._reserved, *self.names()))
        raise UserError(f"config.{self._field} = {name!r}: choose one of {known}{self._hint}")
