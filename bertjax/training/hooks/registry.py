"""The registry of hooks. `config.hooks` lists the names of the registered hooks of a run."""

from collections.abc import Sequence

from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.registry import Registry
from bertjax.config.lists import split_at_commas
from bertjax.training.hooks.hook import Hook

HOOKS: Registry[type[Hook]] = Registry("hook", "hooks", {})
register = HOOKS.register


def make_hooks(config: ConfigDict) -> list[Hook]:
    """Returns new instances of the hooks in `config.hooks`."""
    return [HOOKS.get(name)() for name in _names(config)]


def validate(config: ConfigDict) -> None:
    """Raises `UserError` if `config.hooks` names a hook that is not registered, or an object that is not a hook."""
    for name in _names(config):
        if name not in (known := HOOKS.names()):
            raise UserError(
                f"config.hooks = {name!r}: the registered hooks are {', '.join(known) or 'none'}; call "
                f"bertjax.training.hooks.register({name!r}, ...) in the experiment's file"
            )
        hook_class = HOOKS.get(name)
        if not (isinstance(hook_class, type) and issubclass(hook_class, Hook)):
            raise UserError(
                f"config.hooks = {name!r}: the registered object {hook_class!r} must be a subclass of "
                f"bertjax.training.hooks.Hook"
            )


def _names(config: ConfigDict) -> list[str]:
    """Returns the names in `config.hooks`. An item may contain several names, separated by commas."""
    names = (name.strip() for item in config.hooks for name in split_at_commas(item))
    return [name for name in dict.fromkeys(names) if name]


def check_hooks(hooks: Sequence[object]) -> None:
    """Raises `UserError` if an object is not a hook."""
    for number, hook in enumerate(hooks):
        if not isinstance(hook, Hook):
            raise UserError(f"hooks[{number}] = {hook!r}: must be an instance of bertjax.training.hooks.Hook")
