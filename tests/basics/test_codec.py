"""JSON data becomes a value of the type that is asked for, or an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Union

import pytest

from autoremat.basics.codec import Codec


@dataclass(frozen=True)
class Place:
    line: int
    near: Place | None = None


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        (int | float, 0.5, 0.5),
        (int | str | None, None, None),
        (str | tuple[int, ...], [1, 2], (1, 2)),
        (Place | int, 3, 3),
        (int | Place, {"line": 3, "near": {"line": 4}}, Place(3, Place(4))),
        (Place, [3, [4]], Place(3, Place(4))),
        (bool | int, 1, 1),
        (Optional[int], None, None),  # noqa: UP045
        (Union[int, str], "a", "a"),  # noqa: UP007
    ],
)
def test_data_is_read_as_the_first_type_that_fits(kind, data, expected):
    found = Codec().read(kind, data)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("kind", "data"),
    [(int | float, "a"), (int | str, None), (int | None, "a"), (str | Place, {"row": 1}), (Place, [3, None, 4])],
)
def test_data_that_fits_no_type_of_a_union_is_refused(kind, data):
    with pytest.raises(ValueError, match=r"is no|has no field"):
        Codec().read(kind, data)
