from __future__ import annotations

import pytest

from ckptrun.errors import UsageError
from ckptrun.resolve.reference import Reference, nearest_word, parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("best", Reference("best", "best")),
        ("best:val/loss", Reference("best:val/loss", "best", value="val/loss")),
        ("last", Reference("last", "last")),
        ("hpc", Reference("hpc", "hpc")),
        ("auto", Reference("auto", "auto")),
        ("none", Reference("none", "none")),
        ("step:1200", Reference("step:1200", "step", number=1200)),
        ("epoch:0", Reference("epoch:0", "epoch", number=0)),
        ("seq:00042", Reference("seq:00042", "seq", number=42)),
        ("run:other/best", Reference("run:other/best", "run", value="other/best")),
        ("s3://bucket/a", Reference("s3://bucket/a", "url", value="s3://bucket/a")),
        ("a/checkpoints/42", Reference("a/checkpoints/42", "path", value="a/checkpoints/42")),
        ("./last", Reference("./last", "path", value="./last")),
        ("LAST", Reference("LAST", "path", value="LAST")),
        ("a:b", Reference("a:b", "path", value="a:b")),
    ],
)  # fmt: skip
def test_words_are_words_and_all_else_is_a_path(text: str, expected: Reference) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text", ["", " ", "step:", "step:ten", "step:-1", "step:1_000", "step: 7", "epoch:1.5", "seq:٣", "best:"]
)
def test_what_starts_like_a_word_and_is_none_is_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert caught.value.exit_code == 2
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("lst", "last"),
        ("LAST", "last"),
        ("latest", "last"),
        ("bset", "best"),
        ("non", "none"),
        ("stpe:100", "step:100"),
        ("setp:x", "step:N"),
        ("bst:acc", "best:acc"),
        ("epcoh:3", "epoch:3"),
        ("runs/last", None),
        ("./lst", None),
        ("zzzzzz", None),
    ],
)
def test_a_lone_word_gets_the_nearest_reference(text: str, word: str | None) -> None:
    assert nearest_word(text) == word
