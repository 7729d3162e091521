"""Every public parameter is explained where an editor's hover and the API reference look for it."""

import documented
import pytest


def test_every_public_parameter_is_documented() -> None:
    gaps = documented.gaps()
    listing = "\n".join(map(str, gaps))
    assert not gaps, f"{len(gaps)} gaps in the docstrings' Args:\n{listing}"


class Told:
    """One that is documented.

    Args:
        word: What it says.
        gone: What it no longer takes.
    """

    def __init__(self, word: str, silent: int) -> None: ...

    def say(self, times: int) -> None:
        """Say it.

        Args:
            times: How often.
        """


class Heir(Told):
    """Says the same, without a docstring of its own parameters."""

    def say(self, times: int, loud: bool = False) -> None:
        """Say it, maybe loudly."""


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (Told, [("Told", "silent"), ("Told", "gone")]),
        (Heir, [("Heir", "silent"), ("Heir.say", "loud")]),
    ],
)
def test_the_walk_sees_what_is_missing_and_what_a_parent_says(
    cls: type, expected: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for told in (Told, Heir):  # only the library's own classes are walked
        monkeypatch.setattr(told, "__module__", "credo.told")
    own = [
        (g.owner, g.parameter) for g in documented.class_gaps(cls) if g.owner[:4] == cls.__name__
    ]
    assert own == expected
