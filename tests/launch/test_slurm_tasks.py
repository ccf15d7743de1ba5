"""Where tasks meet: said by task 0, found by the others, and gone afterwards."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ckptrun.errors import NoCheckpointError
from ckptrun.launch.endpoint import is_here, parse_endpoint, port_is_free
from ckptrun.launch.meeting import HostError
from ckptrun.launch.slurm_tasks import Gathering, endpoint_of_tasks, forget
from ckptrun.records import JobFacts, TaskFacts

LEADER = TaskFacts(0, 2, 0, 1, ("n1", "n2"), "no-such-host.invalid", "0")
OTHER = replace(LEADER, number=1, node="n2")
JOB = JobFacts("7_1", True, 0, (), "9")


def never() -> bool:
    return False


def gathering(root: Path, task: TaskFacts, *, restarts: int = 0, timeout_s: float = 5.0) -> Gathering:
    return Gathering(task, replace(JOB, restart_count=restarts), str(root), timeout_s)


def test_the_others_find_what_task_0_has_said(tmp_path: Path) -> None:
    with endpoint_of_tasks(gathering(tmp_path, LEADER), over=never, say=print) as endpoint:
        assert endpoint is not None
        place = parse_endpoint(endpoint)
        assert is_here(place.host)
        assert port_is_free(place.port)
        with endpoint_of_tasks(gathering(tmp_path, OTHER), over=never, say=print) as found:
            assert found == endpoint
        assert os.listdir(tmp_path) == [".meet-7_1-0-0.json"]
    assert os.listdir(tmp_path) == []


def test_once_all_have_met_the_next_command_of_the_step_does_not_find_it(tmp_path: Path) -> None:
    with endpoint_of_tasks(gathering(tmp_path, LEADER), over=never, say=print):
        forget(gathering(tmp_path, LEADER))
        with (
            pytest.raises(HostError, match=r"task 0 of step 7_1\.0 has not said where to meet"),
            endpoint_of_tasks(gathering(tmp_path, OTHER, timeout_s=0.2), over=never, say=print),
        ):
            pass


def test_what_an_earlier_start_of_the_job_left_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / ".meet-7_1-0-0.json").write_text(json.dumps({"endpoint": "old:1"}))
    with (
        pytest.raises(HostError),
        endpoint_of_tasks(gathering(tmp_path, OTHER, restarts=1, timeout_s=0.2), over=never, say=print),
    ):
        pass


def test_a_stop_ends_the_wait(tmp_path: Path) -> None:
    with endpoint_of_tasks(gathering(tmp_path, OTHER), over=lambda: True, say=print) as endpoint:
        assert endpoint is None


def test_a_root_is_made_for_the_first_start_and_taken_back_where_nothing_came_of_it(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    with endpoint_of_tasks(gathering(root, LEADER), over=never, say=print):
        assert root.is_dir()
    assert not root.exists()
    with endpoint_of_tasks(gathering(root, LEADER), over=never, say=print):
        (root / "demo").mkdir()
    assert root.is_dir()


@pytest.mark.parametrize("task", [LEADER, OTHER])
@pytest.mark.parametrize("there", [None, [], [".meet-7_1-1-0.json"]])
def test_a_job_that_came_back_and_finds_no_root_or_nothing_in_it_is_refused(
    there: list[str] | None, task: TaskFacts, tmp_path: Path
) -> None:
    root = tmp_path / "runs"
    for name in there or []:
        root.mkdir(exist_ok=True)
        (root / name).write_text('{"endpoint": "of another task:1"}')
    if there == []:
        root.mkdir()
    what = "does not exist" if there is None else "is empty"
    with (
        pytest.raises(NoCheckpointError, match=f"{what}, though the job was requeued and so was here before"),
        endpoint_of_tasks(gathering(root, task, restarts=1), over=never, say=print),
    ):
        pass
    assert (sorted(os.listdir(root)) if root.exists() else None) == there


@pytest.mark.parametrize("task", [LEADER, OTHER])
@pytest.mark.parametrize(
    ("job", "how"),
    [
        (replace(JOB, restart_count=1), "was requeued"),
        (replace(JOB, previous=("5_1", "4_1")), "was resubmitted from job 5_1"),
    ],
)
def test_a_job_that_came_back_and_finds_no_root_is_refused(
    job: JobFacts, how: str, task: TaskFacts, tmp_path: Path
) -> None:
    root = tmp_path / "runs"
    with (
        pytest.raises(
            NoCheckpointError, match=f"does not exist, though the job {how} and so was here before"
        ),
        endpoint_of_tasks(Gathering(task, job, str(root), 5.0), over=never, say=print),
    ):
        pass
    assert not root.exists()
