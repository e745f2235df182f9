"""The endpoints of the server: an endpoint reads the requests of a protocol, and writes the answers and the errors."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec

from bertjax.library.model import Model
from bertjax.serving.methods import Method

T = TypeVar("T")


class Limits(NamedTuple):
    """The limits of requests.

    Attributes:
      texts: texts of a request.
      characters: characters of all texts of a request.
      batch: texts of any requests that are computed together.
      waiting: texts of all requests that wait.
    """

    texts: int = 256
    characters: int = 100_000
    batch: int = 32
    waiting: int = 4096


class Refused(Exception):
    """The error with which a request is answered: an HTTP status and a message."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Request(NamedTuple):
    """The content of a request.

    Attributes:
      method: the method with its options.
      inputs: the inputs of the method.
      body: the fields of the request, for `Computation.answer`.
    """

    method: Method
    inputs: Sequence[Any]
    body: Any = None


class Endpoint:
    """A path of a protocol. The base class writes errors as bertjax does.

    Attributes:
      statuses: {HTTP status of bertjax: HTTP status of the protocol}, if they differ.
    """

    statuses: ClassVar[Mapping[int, int]] = {}

    def error(self, status: int, message: str) -> Any:
        """Returns the answer, as a value of JSON, to a request that failed with a status of the protocol."""
        return {"error": message}


class Description(Endpoint, abc.ABC):
    """A path that describes the checkpoint."""

    @abc.abstractmethod
    def describe(self, model: Model, limits: Limits) -> Any:
        """Returns the answer as a value of JSON."""


class Computation(Endpoint, abc.ABC):
    """A path whose requests contain inputs of a method.

    Attributes:
      field: the field of a request that contains the inputs. It distinguishes the protocols of a path.
    """

    field: str

    @abc.abstractmethod
    def check(self, model: Model) -> None:
        """Raises `Refused` if the checkpoint does not have the ability."""

    def supports(self, model: Model) -> bool:
        """Returns whether the checkpoint has the ability."""
        try:
            self.check(model)
        except Refused:
            return False
        return True

    def count(self, value: Any) -> int:
        """Returns the number of inputs in the field `field`, which is a value of JSON of any type.

        The server counts the inputs before it converts them, because the conversion of many inputs takes seconds.
        """
        return len(value) if isinstance(value, list) else 1

    @abc.abstractmethod
    def read(self, content: dict[str, Any], model: Model) -> Request:
        """Returns the request of a JSON object with the field `field`. Raises `Refused` for a wrong value."""

    @abc.abstractmethod
    def answer(self, request: Request, results: Sequence[Any], model: Model) -> Any:
        """Returns the answer as a value of JSON. Raises `Refused` if the results do not meet the request."""


class MethodComputation(Computation):
    """The requests of bertjax: `POST /METHOD` with inputs and options, answered with `results`.

    Args:
      name: the name of the method.
      kind: the class of the method; None if the checkpoint does not support it.
      paths: the paths that the server answers, for messages.
    """

    def __init__(self, name: str, kind: type[Method] | None, paths: str) -> None:
        self._name, self._kind, self._paths = name, kind, paths
        self.field = kind.field if kind else Method.field

    def check(self, model: Model) -> None:
        """Raises `Refused` if the checkpoint does not support the method."""
        if self._kind is None:
            name = self._name
            raise Refused(400, f"/{name}: the checkpoint {model.path} does not support {name}; {self._paths}")

    def read(self, content: dict[str, Any], model: Model) -> Request:
        """Returns the request. Raises `Refused` for an unknown field."""
        assert self._kind is not None
        kind, field = self._kind, self.field
        values = content.pop(field)
        options = [option.name for option in dataclasses.fields(kind)]
        if unknown := [name for name in content if name not in options]:
            raise Refused(400, f"{unknown[0]!r}: unknown field; the fields are {', '.join([field, *options])}")
        inputs = convert(values if isinstance(values, list) else [values], kind.inputs_type, field)
        if kind.takes_one and len(inputs) != 1:
            raise Refused(400, f"{field}: must be one text")
        return Request(convert(content, kind), inputs)

    def answer(self, request: Request, results: Sequence[Any], model: Model) -> Any:
        """Returns the result of a method with one input, or {"results": the results}."""
        answers = list(map(request.method.as_json, results))
        return answers[0] if request.method.takes_one else {"results": answers}


def convert(value: Any, kind: type[T], field: str = "") -> T:
    """Converts JSON to a type. Raises `Refused` with the path of the wrong value, below `field`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at ")
        place = f"{field}{path.strip('`$.')}"
        raise Refused(400, f"{place}: {problem[0].lower()}{problem[1:]}" if place else problem) from None
