from __future__ import annotations

import json
from dataclasses import replace

from resolve_helpers import ListView, bad, ck, registry_of

from ckptrun.records import FreshStart, Resolution
from ckptrun.resolve.explain import headline, rule_text, table_rows, to_json
from ckptrun.resolve.facts import ResolveFacts
from ckptrun.resolve.rules import resolve

KEYS = {"ref", "rule", "fresh", "path", "step", "warnings", "candidates", "num_not_reached", "error"}


def asked(reference: str, *disk: object, **more: object) -> Resolution:
    return resolve(ResolveFacts(reference=reference, run_name="gpt", **more), registry_of(), ListView(disk))  # type: ignore[arg-type]


def test_the_document_has_the_promised_keys() -> None:
    value = json.loads(json.dumps(to_json(asked("last", ck(1), bad(2)))))
    assert set(value) >= KEYS
    assert (value["ref"], value["rule"], value["fresh"], value["step"], value["error"]) == (
        "last",
        2,
        False,
        100,
        None,
    )
    assert value["path"] == ck(1).path
    assert [set(candidate) for candidate in value["candidates"]] == [
        {"path", "step", "sequence", "reason_saved", "verdict", "why"}
    ] * 2
    assert [candidate["verdict"] for candidate in value["candidates"]] == ["rejected", "taken"]


def test_a_fresh_start_has_no_path() -> None:
    value = to_json(asked("last"))
    assert (value["fresh"], value["path"], value["step"]) == (True, None, None)
    assert value["warnings"]


def test_an_error_carries_its_exit_code() -> None:
    value = to_json(asked("last", bad(1)))
    assert set(value["error"]) == {"exit_code", "message", "hint"}
    assert value["error"]["exit_code"] == 3
    assert (value["fresh"], value["path"]) == (False, None)


def test_at_most_twenty_that_were_not_reached_unless_all_are_asked_for() -> None:
    resolution = asked("last", *(ck(number) for number in range(1, 101)), num_listed=None)
    assert len(to_json(resolution)["candidates"]) == 21
    assert len(to_json(resolution, all_candidates=True)["candidates"]) == 100
    assert to_json(resolution)["num_not_reached"] == 99


def test_the_table_has_a_row_for_each_candidate() -> None:
    rows = table_rows(asked("last", ck(1), bad(2)))
    assert [(row.verdict, row.step, row.sequence) for row in rows] == [
        ("rejected", "200", "2"),
        ("taken", "100", "1"),
    ]
    assert rows[1].name == ck(1).name


def test_the_answer_in_one_line() -> None:
    taken = asked("last", ck(1))
    assert headline(taken) == f"step 100 from {ck(1).path} (rule 2, last)"
    assert headline(asked("none")) == "fresh start (rule 1, none)"
    assert (
        headline(replace(taken, answer=FreshStart("w.pt")))
        == "fresh start with the weights of w.pt (rule 2, last)"
    )
    assert headline(replace(taken, answer="/w.pt")) == "the weights in /w.pt (rule 2, last)"
    assert headline(replace(taken, answer=None)) == "no answer (rule 2, last)"
    assert all(rule_text(number) for number in range(9))
