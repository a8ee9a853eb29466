"""Futures that several threads may answer: the first answer counts."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

_T = TypeVar("_T")


def resolve(future: Future[_T], result: _T) -> None:
    """Set the result of the future, unless it is answered."""
    with suppress(InvalidStateError):
        future.set_result(result)


def reject(future: Future[_T], error: BaseException) -> None:
    """Set the exception of the future, unless it is answered."""
    with suppress(InvalidStateError):
        future.set_exception(error)
