"""Formats of optimizer state: fields, their types, and the bytes that follow from them.

There are three formats. `float32`: AdamW's moments at full precision, and float32 masters of 16-bit
parameters. `split`, for bfloat16 parameters: the same values in fewer bytes, for the parameter is the
upper half of its master. `int8`: the moments in 8 bits each, which are other values, with masters as in
the first two. A parameter in float32 is its own master in each of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1, "uint8": 1}
"""Bytes of an element, by the name that torch has for its type."""

BLOCK = 128
"""Elements that share a scale where moments are in codes."""

MASTER = "master"
"""The field that holds the parameters as they are updated, where that is in another type than their own."""
REST = "rest"
"""The field that holds the lower halves of split masters."""
MASTER_KEY, REST_KEY = "master_param", "master_rest"
"""Their names in a state dict."""
CODED_KEYS = {name: (f"{name}_codes", f"{name}_scales") for name in ("exp_avg", "exp_avg_sq")}
"""The names of moments in codes, by the names that AdamW has for the moments."""
INT8 = "int8"
STATE_FORMATS = (None, "float32", INT8)
"""Formats that a user may ask for. None: the least bytes that change no result; float32: whole masters; int8: moments
in codes."""


@dataclass(frozen=True)
class Field:
    """One tensor of the state.

    type: of its elements, as torch calls it.
    key: its name in a state dict, AdamW's where AdamW has it; None: it is not there, for the
        parameter says the same.
    block: parameters to one element.
    """

    name: str
    type: str
    key: str | None
    block: int = 1

    @cached_property
    def nbytes(self) -> float:
        """Bytes per parameter."""
        return BYTES[self.type] / self.block


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of scales: a last axis of whole blocks has one for each of these, else all are on one axis."""
    if shape[-1] % BLOCK == 0:
        return (*shape[:-1], shape[-1] // BLOCK)
    return (math.prod(shape) // BLOCK,)


@dataclass(frozen=True)
class Format:
    """The state of parameters of one type, kept in one way. Every figure is in bytes per parameter.

    values: type of the parameters.
    fields: in the order in which they are allocated, copied and listed.
    """

    name: str
    values: str
    fields: tuple[Field, ...]

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the fields."""
        return frozenset(field.name for field in self.fields)

    @cached_property
    def master(self) -> Field | None:
        """The field of the masters; None where updates read and write the parameters."""
        return next((field for field in self.fields if field.name == MASTER), None)

    @cached_property
    def has_masters(self) -> bool:
        """Whether state has masters or parts of them, which have to follow the parameters."""
        return not self.names.isdisjoint((MASTER, REST))

    @property
    def block(self) -> int:
        """Parameters that share an element of a field; tensors with such state have a multiple of it."""
        return max(field.block for field in self.fields)

    @cached_property
    def state_bytes(self) -> float:
        """Bytes of all fields: at home, on the link each way, and on the device."""
        return sum(field.nbytes for field in self.fields)

    @cached_property
    def value_bytes(self) -> int:
        """Bytes of a parameter, and of its gradient, which has the same type."""
        return BYTES[self.values]

    @cached_property
    def read_bytes(self) -> int:
        """Bytes of the parameter, where an update reads it because it is its master, or half of that.

        From the device, where the host updates after an update there.
        """
        return 0 if self.master else self.value_bytes

    @property
    def held_bytes(self) -> float:
        """Bytes that an update needs in host memory: state, gradient and parameter."""
        return self.state_bytes + 2 * self.value_bytes

    @cached_property
    def update_traffic(self) -> float:
        """Host memory traffic of an update there."""
        return update_traffic(self.value_bytes, self.value_bytes, self.state_bytes, self.read_bytes)


def float32(values: str, *, master_weights: bool = True, amsgrad: bool = False) -> Format:
    """Moments in float32, and the masters of 16-bit parameters.

    values: type of the parameters.
    master_weights: whether 16-bit parameters have a float32 master. All others are updated themselves.
    """
    fields = [Field(name, "float32", name) for name in ("exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * amsgrad)]
    if master_weights and values != "float32":
        fields.append(Field(MASTER, "float32", MASTER_KEY))
    return Format("float32", values, tuple(fields))


def split(*, amsgrad: bool = False) -> Format:
    """Moments in float32, and the lower halves of the float32 masters of bfloat16 parameters.

    The bits of a master are its parameter's followed by 16 zeros, plus the rest as a signed number.
    """
    moments = float32("bfloat16", master_weights=False, amsgrad=amsgrad).fields
    return Format("split", "bfloat16", (*moments, Field(REST, "int16", REST_KEY)))


def int8(exact: Format) -> Format:
    """Moments in codes, with scales by blocks; see dos/kernels/codes.py. The master as in another format.

    Raises ValueError for a format with amsgrad.
    """
    fields = {field.name: field for field in exact.fields}
    coded = [Field(name, code, CODED_KEYS[name][0]) for name, code in (("exp_avg", "int8"), ("exp_avg_sq", "uint8"))]
    scales = [Field(f"{name}_scale", "float32", CODED_KEYS[name][1], BLOCK) for name in CODED_KEYS]
    others = [field for name, field in fields.items() if name not in CODED_KEYS]
    if any(field.name not in (MASTER, REST) for field in others):
        raise ValueError("amsgrad needs max_exp_avg_sq in float32, and the moments with it; found state_format='int8'")
    return Format(INT8, exact.values, (*coded, *scales, *others))


def format_of(
    values: str,
    *,
    state_format: str | None = None,
    master_weights: bool = True,
    amsgrad: bool = False,
) -> Format:
    """The format in which DOSAdam keeps the state of parameters of one type.

    state_format: one of STATE_FORMATS. The other settings are those of `float32`.
    """
    if values == "bfloat16" and master_weights and state_format != "float32":
        exact = split(amsgrad=amsgrad)
    else:
        exact = float32(values, master_weights=master_weights, amsgrad=amsgrad)
    return int8(exact) if state_format == INT8 else exact


MIXED = float32("bfloat16")
"""Mixed precision as it is usually kept, with which rates are measured; assumed where nothing else is said."""
SPLIT = split()
"""Mixed precision as DOSAdam keeps it."""
CODED = int8(SPLIT)
"""Mixed precision as DOSAdam keeps it with moments in codes."""

STATE_KEYS = (
    *(field.key for field in float32("bfloat16", amsgrad=True).fields if field.key),
    REST_KEY,
    *(key for keys in CODED_KEYS.values() for key in keys),
)
"""All names that state tensors may have in a state dict."""
NEEDED_KEYS = tuple(field.key for field in float32("float32").fields if field.key)
"""Names without which a state is not AdamW's."""


def update_traffic(gradient_bytes: int, parameter_bytes: int, state_bytes: float, read_bytes: int = 0) -> float:
    """Host memory traffic of an update, from the bytes of each part.

    State is read and written, the gradient read, the parameter written, and read where it is its master or half of it.
    """
    return 2 * state_bytes + gradient_bytes + parameter_bytes + read_bytes
