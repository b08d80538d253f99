"""Ranking keeps names in order of a number each has, ties by name, so that the least is found without looking at all.

A sorted list: a few microseconds for a change among thousands. It knows nothing of what the numbers mean.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection
from itertools import islice


def put_or_drop(names: dict[str, None], name: str, is_one: bool) -> None:
    """Whether the name is one of these."""
    if is_one:
        names[name] = None
    else:
        names.pop(name, None)


class Ranking:
    def __init__(self) -> None:
        self.keys: list[tuple[int, str]] = []  # ascending; whoever reads it changes nothing meanwhile
        self._value_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def put(self, name: str, value: int) -> None:
        """The name has this number from now on."""
        old = self._value_of.get(name)
        if old == value:
            return
        self._value_of[name] = value
        keys, new = self.keys, (value, name)
        if old is not None:
            at = bisect_left(keys, (old, name))
            if (at == 0 or keys[at - 1] < new) and (at + 1 == len(keys) or new < keys[at + 1]):
                keys[at] = new  # its place is the same
                return
            del keys[at]
        insort(keys, new)

    def drop(self, name: str) -> None:
        """Leave the name out, if it is there."""
        value = self._value_of.pop(name, None)
        if value is not None:
            del self.keys[bisect_left(self.keys, (value, name))]

    def least(self, value: int) -> int:
        """The place of the first name whose number is `value` or more."""
        return bisect_left(self.keys, (value, ""))

    def first(self, count: int, leave_out: Collection[str] = ()) -> list[str]:
        """The names of so many, the least first."""
        if not leave_out:
            return [name for _, name in self.keys[:count]]
        return list(islice((name for _, name in self.keys if name not in leave_out), count))

    def check_invariants(self, values: dict[str, int]) -> None:
        """Assert that it ranks exactly these."""
        assert self.keys == sorted((value, name) for name, value in values.items()), "the ranking is not in order"
        assert self._value_of == values, "the ranking and its numbers disagree"
