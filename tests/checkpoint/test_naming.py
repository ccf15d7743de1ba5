from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptrun.checkpoint import naming

sequences = st.integers(1, 10**11)
labels = st.text(st.characters(codec="utf-8"), min_size=1).filter(
    lambda text: naming.sanitize_label(text) != ""
)


def test_a_name_holds_counter_and_label() -> None:
    assert naming.folder_name(42, naming.step_label(1200)) == "00000042-step-00001200"
    assert naming.parse("00000042-step-00001200") == naming.ParsedName(42, "step-00001200")
    assert naming.parse("00000042-step-00001200").step == 1200  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("label", "step"),
    [
        ("epoch=3-step=1200", 1200),
        ("step-00000007", 7),
        ("epoch=3", None),
        ("val_loss=0.5", None),
        ("step=", None),
    ],
)
def test_the_step_is_told_by_the_usual_labels(label: str, step: int | None) -> None:
    assert naming.ParsedName(1, label).step == step


@pytest.mark.parametrize(
    "name",
    [
        ".tmp-00000042-step-00001200",
        ".trash-00000042-step-00001200",
        "42-step-00001200",
        "000000042-step-00001200",
        "00000042-",
        "00000042",
        "step-00001200",
        "٠٠٠٠٠٠٤٢-step",
        "last",
    ],
)
def test_other_names_are_not_checkpoints(name: str) -> None:
    assert naming.parse(name) is None


@given(sequences, labels)
def test_a_name_is_read_as_it_was_written(sequence: int, label: str) -> None:
    parsed = naming.parse(naming.folder_name(sequence, label))
    assert parsed == (sequence, naming.sanitize_label(label))


@given(labels)
def test_a_label_is_one_path_component(label: str) -> None:
    name = naming.folder_name(1, label)
    assert "/" not in name
    assert "\0" not in name
    assert len((naming.TRASH_PREFIX + name).encode()) <= 255


@pytest.mark.parametrize(("sequence", "label"), [(0, "a"), (-1, "a"), (1, ""), (1, " / ")])
def test_a_name_needs_both_parts(sequence: int, label: str) -> None:
    with pytest.raises(ValueError, match=r"counter|label"):
        naming.folder_name(sequence, label)


@given(st.lists(st.tuples(sequences, st.sampled_from(["step-00000009", "step-00000010", "a"])), unique=True))
def test_order_is_that_of_the_numbers(saves: list[tuple[int, str]]) -> None:
    names = [naming.folder_name(*save) for save in saves]
    junk = [".tmp-00000001-a", "notes.txt", "00000001", "00000001-", "1234567890", "9-a"]
    ordered = naming.newest_first(names + junk)
    assert sorted(ordered) == sorted(names)
    counters = [naming.parse(name).sequence for name in ordered]  # type: ignore[union-attr]
    assert counters == sorted(counters, reverse=True)


def test_ten_comes_after_nine_and_nine_digits_after_eight() -> None:
    names = [naming.folder_name(number, "s") for number in (9, 10, 9_900, 10_000, 99_999_999, 100_000_000)]
    assert naming.newest_first(names) == names[::-1]
