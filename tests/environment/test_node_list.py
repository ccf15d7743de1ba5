"""The grammar of SLURM's node lists."""

from __future__ import annotations

import pytest

from ckptrun.environment.node_list import expand, expand_counts


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-2]", ["n1", "n2"]),
        ("n[1,3-4]", ["n1", "n3", "n4"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("gpu-a[1-2],login,gpu-b[7]", ["gpu-a1", "gpu-a2", "login", "gpu-b7"]),
        ("rack[1-2]node[01,03]", ["rack1node01", "rack1node03", "rack2node01", "rack2node03"]),
        ("a-[1-2]-ib0,b", ["a-1-ib0", "a-2-ib0", "b"]),
        ("n2,n1", ["n2", "n1"]),  # the order is the list's
        ("node.example.org", ["node.example.org"]),
    ],
)
def test_a_list_names_its_nodes(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    "text",
    ["n[1-2", "n1]", "n[[1]]", "n[a-b]", "n[3-1]", "n[]", "n1,,n2", "n[0-99999999999]", "[0-9999][0-9999]"],
)
def test_what_is_no_list_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"no node list|names [0-9]+ nodes"):
        expand(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("1", [1]), ("2(x3)", [2, 2, 2]), ("2(x2),1", [2, 2, 1]), ("4,2", [4, 2])]
)
def test_counts_of_tasks(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(3)", "2(x)", "1,,2"])
def test_what_are_no_counts(text: str) -> None:
    with pytest.raises(ValueError, match="no list of task counts"):
        expand_counts(text)
