"""A resolution as lines, and the document where there is none."""

from __future__ import annotations

from ckptrun.cli.resolution import lines, without_resolution
from ckptrun.records import Candidate, CheckpointRecord, FreshStart, Resolution
from ckptrun.resolve.explain import rule_text, to_json

TAKEN = CheckpointRecord(
    name="00000002-step-00000020", path="/r/demo/checkpoints/00000002-step-00000020", sequence=2, step=20,
    epoch=0, reason="periodic",
)  # fmt: skip
CANDIDATES = (
    Candidate("/r/demo/checkpoints/00000003-x", 30, 3, None, "rejected", "no manifest.json"),
    Candidate(TAKEN.path, 20, 2, "periodic", "taken", "the newest save that can be used"),
    Candidate("/r/demo/checkpoints/00000001-step-00000010", 10, 1, "periodic", "not reached", "not needed"),
)


def test_lines_give_the_answer_the_rule_and_every_candidate() -> None:
    shown = lines(Resolution(ref="last", rule=2, answer=TAKEN, candidates=CANDIDATES, num_not_reached=41))
    assert shown == [
        f"step 20 from {TAKEN.path} (rule 2, last)",
        f"rule 2: {rule_text(2)}",
        "",
        "verdict      checkpoint              step  save  reason    why",
        "rejected     00000003-x                30     3            no manifest.json",
        "taken        00000002-step-00000020    20     2  periodic  the newest save that can be used",
        "not reached  00000001-step-00000010    10     1  periodic  not needed",
        "and 40 more that were not reached; --all lists them",
    ]


def test_without_candidates_there_is_no_table() -> None:
    assert lines(Resolution(ref=None, rule=7, answer=FreshStart("w.ckpt"))) == [
        "fresh start with the weights of w.ckpt (rule 7)",
        f"rule 7: {rule_text(7)}",
    ]


def test_every_rule_has_its_words() -> None:
    assert all(rule_text(number) for number in range(9))


def test_the_document_has_the_same_keys_with_and_without_a_resolution() -> None:
    resolved = to_json(Resolution(ref="last", rule=2, answer=TAKEN, candidates=CANDIDATES))
    unresolved = without_resolution("last", {"exit_code": 2, "message": "m", "hint": None})
    assert list(unresolved) == list(resolved)
    assert unresolved["error"] == {"exit_code": 2, "message": "m", "hint": None}
