"""Every generator against its parser: a short slice with fixed seeds always, a longer one with the slow tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from generators import GENERATORS
from hunt import finding, some_cases

from forks import Forks


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    started = Forks("targets", "vitkit.runtime.onnx", "vitkit.web.app", "serving")
    yield started
    started.close()


def hunt(forks: Forks, name: str, cases: int) -> None:
    for case in some_cases(name, 1, cases):
        found = finding(forks, name, case)
        assert not found, f"{name}: {found}\n{case}"


@pytest.mark.parametrize("name", GENERATORS)
def test_a_few_cases(name: str, forks: Forks) -> None:
    hunt(forks, name, 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATORS)
def test_many_cases(name: str, forks: Forks) -> None:
    hunt(forks, name, 60)  # `make fuzz MINUTES=...` goes on for as long as one likes


def test_the_hunt_sees_what_it_should(forks: Forks) -> None:
    """A crash, another error, too much memory and too much time are findings; success and refusal are not."""
    assert "ZeroDivisionError" in finding(forks, "", {}, "planted:divide")
    assert "MemoryError" in finding(forks, "", {}, "planted:grow")
    assert "signal 11" in finding(forks, "", {}, "planted:crash")
    assert "time" in finding(forks, "", {}, "planted:hang", seconds=1.0)
    assert not finding(forks, "", {}, "planted:refuse")


def test_cases_are_the_same_for_the_same_number() -> None:
    assert some_cases("data table", 3, 5) == some_cases("data table", 3, 5) != some_cases("data table", 4, 5)
