"""Registries: one decorator on a factory makes it available by name, in Python, settings and `fedcover list`."""

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import TypeVar

from fedcover.errors import InputError

Product = TypeVar("Product")
Factory = TypeVar("Factory", bound=Callable[..., object])


class Registry(Mapping[str, Callable[..., Product]]):
    """The factories of one kind of object by name; case, hyphens and underscores do not matter.

    The parameters of a factory become settings of runs, and the first line of its docstring is what `fedcover list`
    shows.

    Args:
        noun: What the factories build, for error messages, such as "server optimizer".

    >>> numbers = Registry("number")
    >>> @numbers.register("Forty_Two")
    ... def answer() -> int:
    ...     return 42
    >>> numbers.find("forty-two")[1]()
    42
    """

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._factories: dict[str, Callable[..., Product]] = {}
        self._names: dict[str, str] = {}
        """The registered name for every name and alias, without case, hyphens and underscores."""

    def __getitem__(self, name: str) -> Callable[..., Product]:
        return self._factories[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._factories)

    def __len__(self) -> int:
        return len(self._factories)

    def register(self, name: str, *aliases: str) -> Callable[[Factory], Factory]:
        """Return a decorator that registers a factory under a name.

        Args:
            name: The name that lists and records show.
            aliases: Other names under which users may ask for it.

        Raises:
            InputError: If the name or an alias is already registered.
        """

        def decorate(factory: Factory) -> Factory:
            for key in (name, *aliases):
                if _normalise(key) in self._names:
                    raise InputError(f"the {self.noun} '{key}' is already registered; choose another name")
                self._names[_normalise(key)] = name
            self._factories[name] = factory  # type: ignore[assignment]
            return factory

        return decorate

    def find(self, name: str) -> tuple[str, Callable[..., Product]]:
        """Return the registered name and the factory for a name.

        Raises:
            InputError: If there is none; the message suggests the nearest one.
        """
        if (key := self._names.get(_normalise(name))) is None:
            near = get_close_matches(_normalise(name), map(_normalise, self), n=1)
            hint = f"; did you mean '{self._names[near[0]]}'?" if near else ""
            raise InputError(f"there is no {self.noun} '{name}'; use one of {', '.join(self)}{hint}")
        return key, self._factories[key]


def _normalise(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
