"""A piece of work of a study: what its result depends on, and how it is computed."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")

DIGEST_LENGTH = 32


@dataclass(frozen=True, eq=False)
class Content:
    """What a unit came to.

    Attributes:
        facts: what JSON can hold.
        tensors: the rest, on the CPU.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class Unit(ABC):
    """A piece of work; two with equal keys are one.

    Attributes:
        kind: what sort of work it is, part of the digest.
        one_thread: whether it is computed by one thread, as what has to come out the same to the
            last bit on one machine; others take the threads of the study.
    """

    kind: ClassVar[str]
    one_thread: ClassVar[bool] = False

    @property
    @abstractmethod
    def key(self) -> Mapping[str, Any]:
        """All that the result depends on, for JSON: content fingerprints, settings, seeds."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What messages call it."""

    @property
    def needs(self) -> tuple[Unit, ...]:
        """The units whose contents this one reads."""
        return ()

    @abstractmethod
    def compute(self, bench: Bench) -> Content:
        """Do the work."""

    @cached_property
    def digest(self) -> str:
        """The name of its file: SHA-256 of kind, key and the digests of what it needs."""
        parts = [self.kind, self.key, [unit.digest for unit in self.needs]]
        text = json.dumps(parts, sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


class Bench(Protocol):
    """Where units are computed: the study's data, and what other units came to."""

    def found(self, unit: Unit) -> Content:
        """The content of a unit that is done."""

    def known(self, unit: Unit) -> Content | None:
        """The content of a unit, or None where it is not done."""

    def cached(self, name: str, make: Callable[[], T]) -> T:
        """What `make` gave when it was first asked for under this name, by any unit."""
