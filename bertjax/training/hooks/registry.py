"""Hooks by name: `config.hooks` names the hooks of a run that a user has registered."""

from collections.abc import Sequence

from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.registry import Registry
from bertjax.config.lists import split_at_commas
from bertjax.training.hooks.hook import Hook

HOOKS: Registry[type[Hook]] = Registry("hook", "hooks", {})
register = HOOKS.register


def make_hooks(config: ConfigDict) -> list[Hook]:
    """Makes the hooks that `config.hooks` names."""
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
                f"config.hooks = {name!r}: is registered as {hook_class!r}, which must be a subclass of "
                f"bertjax.training.hooks.Hook"
            )


def _names(config: ConfigDict) -> list[str]:
    """Returns the names in `config.hooks`. One text may hold several names with commas between."""
    names = (name.strip() for text in config.hooks for name in split_at_commas(text))
    return [name for name in dict.fromkeys(names) if name]


def check_hooks(hooks: Sequence[object]) -> None:
    """Raises `UserError` if an object is not a hook."""
    for number, hook in enumerate(hooks):
        if not isinstance(hook, Hook):
            raise UserError(f"hooks[{number}] = {hook!r}: must be an instance of bertjax.training.hooks.Hook")
