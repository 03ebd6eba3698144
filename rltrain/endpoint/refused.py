"""Requests that are not answered, and why, whichever API they came by."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any


class Refused(Exception):  # noqa: N818 - names what happened
    """`status` is HTTP's. `param` names the field of the request, `code` the reason in one word for programs."""

    def __init__(self, status: HTTPStatus, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def invalid(message: str, param: str | None = None, code: str | None = None) -> Refused:
    """The request is wrong, and would be whenever it came."""
    return Refused(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def object_in(part: object, where: str) -> Mapping[str, Any]:
    """`part` of a list of JSON objects. Raises Refused where it is none."""
    if not isinstance(part, Mapping):
        raise invalid(f"{where}: got {str(part)[:80]!r}; expected an object", where)
    return part


def text_in(part: Mapping[str, Any], where: str) -> str:
    """The text of a part of a message, "" where it has none. Raises Refused where that is no text."""
    text = part.get("text") or ""
    if not isinstance(text, str):
        raise invalid(f"{where}: got {str(text)[:80]!r} as text; expected a string", where)
    return text


def unsupported(param: str, given: object, expected: str) -> Refused:
    """A field that would change what is answered, and that this server does not do."""
    message = f"{param}: got {given!r}, which this server does not support; expected {expected}"
    return invalid(message, param, "unsupported_value")
