"""One rule for naming a class: a name if there is such a name, else an index."""

import pytest

from vitkit.errors import InputError
from vitkit.model.base import find_class

TURNED = [str(i) for i in range(9, -1, -1)]  # classes called "9" .. "0"


@pytest.mark.parametrize("index", range(10))
def test_a_name_wins_over_an_index(index: int) -> None:
    assert find_class(str(index), TURNED, 10) == 9 - index
    assert find_class(f"#{index}", TURNED, 10) == index


def test_names_match_exactly_then_by_case_then_by_synonym() -> None:
    names = ["tabby, tabby cat", "golden retriever", "CAT", "cat"]
    assert find_class("cat", names, 4) == 3
    assert find_class("CAT", names, 4) == 2
    assert find_class("Tabby Cat", names, 4) == 0
    assert find_class("Golden Retriever", names, 4) == 1
    assert find_class("1", names, 4) == 1
    assert find_class("1", None, 4) == 1


def test_an_unknown_class_says_what_to_give() -> None:
    names = ["tabby, tabby cat", "golden retriever"]
    with pytest.raises(InputError, match="Did you mean golden retriever"):
        find_class("golden retreiver", names, 2)
    for word in ("2", "#2", "9999999999999"):
        with pytest.raises(InputError, match="classes 0 to 1"):
            find_class(word, names, 2)
    for word in ("-1", "²"):
        with pytest.raises(InputError, match="no class is called"):
            find_class(word, names, 2)
    with pytest.raises(InputError, match="no class names"):
        find_class("cat", None, 2)
