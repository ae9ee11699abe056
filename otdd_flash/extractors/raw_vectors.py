"""The identity extractor: numeric features exactly as they stand in the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.real_numbers import check_integers, exact_array


@dataclass(frozen=True)
class RawVectors:
    """See `identity`."""

    key: str = "identity"
    modalities: frozenset[str] = frozenset({"array"})
    cacheable: bool = False

    def __repr__(self) -> str:
        return "identity()"

    def __call__(self, batch: Any) -> Tensor:
        """A batch (b, ...) of numbers as a matrix (b, d); float64 stays, the rest is float32."""
        try:
            values = exact_array("identity: inputs", batch)
        except InputError:
            raise
        except ValueError:
            values = np.asarray(batch, dtype=object)
        if values.dtype.kind not in "fiub":
            raise InputError(
                f"identity takes rows of numbers of one length, got {values.dtype} such as "
                f"{str(values[:1])[:60]}; encode text columns as numbers and pad or cut the rows"
            )
        check_integers("identity", values)
        dtype = np.float64 if values.dtype == np.float64 else np.float32
        rows = np.array(values.reshape(len(values), -1), dtype=dtype)
        return torch.from_numpy(rows)


def identity() -> RawVectors:
    """Make an extractor that takes arrays as they are, flattened after the first dimension.

    float64 features stay float64 (a solver may work in double); other numbers become float32, and
    integers that it does not hold, beyond 2^24, are refused.
    """
    return RawVectors()
