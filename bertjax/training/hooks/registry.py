"""Hooks by name: `config.hooks` names the hooks of a run that a user has registered."""

from collections.abc import Iterable

from bertjax.common.errors import UserError
from bertjax.common.registry import Registry
from bertjax.config.lists import split_at_commas
from bertjax.training.hooks.hook import Hook

HOOKS: Registry[type[Hook]] = Registry("hook", "hooks", {})
register = HOOKS.register


def make_hooks(config) -> tuple[Hook, ...]:
    """Makes the hooks that `config.hooks` names. One name may be several, with commas between."""
    names = (name.strip() for text in config.hooks for name in split_at_commas(text))
    return tuple(_class_of(name)() for name in dict.fromkeys(names) if name)


def _class_of(name: str) -> type[Hook]:
    hook_class = HOOKS.get(name)
    if not (isinstance(hook_class, type) and issubclass(hook_class, Hook)):
        raise UserError(f"config.hooks = {name!r}: {hook_class!r} must be a subclass of bertjax.training.hooks.Hook")
    return hook_class


def check_hooks(hooks: Iterable[object]) -> None:
    """Raises `UserError` if an object is not a hook."""
    for number, hook in enumerate(hooks):
        if not isinstance(hook, Hook):
            raise UserError(
                f"hooks[{number}] = {hook!r}: must be an instance of a subclass of bertjax.training.hooks.Hook"
            )
