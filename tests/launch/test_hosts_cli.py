"""Two hosts through the command line: network namespaces with a cable between them, one command in each.

One test has both commands on this host, where no namespaces are needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import rank_work
from live_cli import Finished, Live
from rank_work import alive, assert_same, checkpoints, picture

from ckptrun.run.attempts import read_attempts
from ckptrun.run.folder import RunFolder
from ckptrun.run.registry import Registry
from ckptrun.run.status import read_status
from ckptrun.stop import SAME_PRESS_S

CONFIG = """\
run: {name: demo}
trainer: {max_steps: 60, max_epochs: -1, num_threads: 1, log_every_n_steps: 1}
model: {class_path: rank_work.Model}
data: {class_path: rank_work.Data}
callbacks:
  - {class_path: ckptrun.callbacks.ModelCheckpoint, init_args: {monitor: val_loss}}
  - {class_path: ckptrun.callbacks.EarlyStopping, init_args: {monitor: val_loss, patience: 1000}}
"""
SLOWLY = "callbacks.2={class_path: rank_work.Slowly, init_args: {seconds: 0.02}}"
NEVER_ENDING = ("trainer.max_steps=1000000", SLOWLY)


@dataclass(frozen=True)
class Wire:
    """Two hosts, or twice this one: the words that put a command on each, and where they meet."""

    within: tuple[tuple[str, ...], tuple[str, ...]]
    endpoint: str


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module", params=[pytest.param("namespaces", marks=pytest.mark.netns)])
def wire() -> Iterator[Wire]:
    names = [f"ckptrun-{os.getpid()}-{each}" for each in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "va", "netns", names[0], "type", "veth", "peer", "name", "vb", "netns", names[1])
        for name, device, number in zip(names, ("va", "vb"), (1, 2), strict=True):
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        a, b = (("ip", "netns", "exec", name) for name in names)
        yield Wire((a, b), "10.77.0.1:29500")
    except FileNotFoundError:
        pytest.skip("there is no `ip` (iproute2) to make network namespaces with")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    finally:
        for name in names:
            with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
                ip("netns", "delete", name)


@pytest.fixture
def loopback() -> Wire:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return Wire(((), ()), f"127.0.0.1:{free.getsockname()[1]}")


@pytest.fixture
def project(in_tmp_path: Path) -> Path:
    shutil.copy(rank_work.__file__, in_tmp_path / "rank_work.py")
    (in_tmp_path / "ckptrun.yaml").write_text(CONFIG)
    return in_tmp_path


def folder(project: Path, run: str = "demo") -> RunFolder:
    return RunFolder(str(project / "runs" / run))


Start = Callable[..., Live]


def start_on(wire: Wire, start_cli: Start, host: int, *args: str, fn: str = "fit") -> Live:
    return start_cli(fn, *args, "--nnodes", "2", "--rdzv-endpoint", wire.endpoint, within=wire.within[host])


def fit_on_both(wire: Wire, start_cli: Start, *args: str, fn: str = "fit") -> tuple[Live, Live]:
    """The leader and the follower, once it is known which is which."""
    one, other = (start_on(wire, start_cli, host, *args, fn=fn) for host in (0, 1))
    one.wait_for(lambda: "following" in one.stderr + other.stderr, what="the hosts have met")
    return (other, one) if "following" in one.stderr else (one, other)


def wait(*lives: Live) -> list[Finished]:
    return [live.wait() for live in lives]


def test_stopped_at_the_follower_resumed_and_the_same_bits_as_on_one_host(
    wire: Wire, project: Path, start_cli: Start
) -> None:
    leader, follower = fit_on_both(wire, start_cli, "--ckpt", "last", SLOWLY)
    leader.wait_for_step(7, "demo")
    record = read_status(folder(project))
    assert record is not None
    assert [each.rank for each in record.ranks] == [0, 1]
    follower.signal(signal.SIGTERM)
    for done in wait(leader, follower):
        assert done.code == 143, done
        assert "Traceback" not in done.stderr
    assert "to go on, on every host: ckptrun fit" in leader.stderr
    newest = checkpoints(folder(project))[0]
    assert newest.exact
    assert newest.step == leader.status("demo")["step"] < 60
    assert read_attempts(folder(project).attempts)[-1].stop_reason == "sigterm"
    leader, follower = fit_on_both(wire, start_cli, "--ckpt", "last")
    for done in wait(leader, follower):
        assert done.code == 0, done
    assert follower.stdout == ""
    logs = sorted(path.name for path in Path(folder(project).logs_dir).glob("attempt-0002-*.log"))
    assert logs == ["attempt-0002-rank-0000.log", "attempt-0002-rank-0001.log"]
    assert start_cli("fit", "--run", "plain", "--nproc", "2").wait().code == 0
    assert_same(picture(folder(project, "plain")), picture(folder(project)))


def test_both_commands_on_this_host(loopback: Wire, project: Path, start_cli: Start) -> None:
    leader, follower = fit_on_both(loopback, start_cli, "trainer.max_steps=6")
    for done in wait(leader, follower):
        assert done.code == 0, done
    record = read_status(folder(project))
    assert record is not None
    assert (record.step, [each.rank for each in record.ranks]) == (6, [0, 1])
    assert follower.stdout == ""


def test_an_evaluation_takes_the_next_checkpoint_where_one_is_damaged(
    wire: Wire, project: Path, start_cli: Start
) -> None:
    often = (
        "{class_path: ckptrun.callbacks.ModelCheckpoint, init_args: {every_n_train_steps: 3, save_top_k: -1}}"
    )
    done = start_cli("fit", "trainer.max_steps=6", f"callbacks.2={often}").wait()
    assert done.code == 0, done
    newest, before = checkpoints(folder(project))[:2]
    with open(f"{newest.path}/state.ckpt", "r+b") as file:
        file.seek(os.path.getsize(file.name) // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    leader, follower = fit_on_both(wire, start_cli, "--ckpt", "last", "--json", fn="validate")
    for done in wait(leader, follower):
        assert done.code == 0, done
    assert list(Registry.load(folder(project).registry).quarantine) == [os.path.basename(newest.path)]
    document = json.loads(leader.stdout)
    assert document["resolution"]["path"] == before.path
    assert list(document["results"][0]) == ["val_loss"]


def test_a_host_that_is_lost_and_another_in_its_place(wire: Wire, project: Path, start_cli: Start) -> None:
    args = ("--ckpt", "last", "--max-restarts", "1", *NEVER_ENDING)
    leader, follower = fit_on_both(wire, start_cli, *args)
    leader.wait_for_step(7, "demo")
    follower.signal(signal.SIGKILL)
    leader.wait_for_output("restart 1 of 1")
    again = start_on(wire, start_cli, 1, *args)
    leader.wait_for(lambda: leader.status("demo").get("attempt") == 2, what="another attempt")
    before = leader.status("demo")["step"]
    leader.wait_for_step(before + 3, "demo")
    again.signal(signal.SIGKILL)
    (done,) = wait(leader)
    assert done.code == 70, done
    assert "rank 1 is lost with the host" in done.stderr
    assert [each.stop_reason for each in read_attempts(folder(project).attempts)] == ["rank-lost"] * 2
    leader.wait_for(lambda: not alive(folder(project)), 5.0, what="nothing of it is left")


def test_followers_end_soon_after_their_leader_is_killed(wire: Wire, project: Path, start_cli: Start) -> None:
    leader, follower = fit_on_both(wire, start_cli, "--ckpt", "last", *NEVER_ENDING)
    leader.wait_for_step(3, "demo")
    leader.signal(signal.SIGKILL)
    done = follower.wait(15.0)
    assert done.code == 70, done
    assert "the leader" in done.stderr
    assert "is gone" in done.stderr
    assert follower.survivors() == []


ENVIRONMENT = """\
import json, os
from ckptrun import Callback

class Told(Callback):
    def on_train_start(self, trainer, *_):
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE TORCHELASTIC_RESTART_COUNT"
        with open(f"rank-{trainer.global_rank}.json", "w") as file:
            json.dump([os.environ[name] for name in names.split()], file)
"""


def test_an_error_at_the_follower_is_told_once_and_ranks_know_their_place(
    wire: Wire, project: Path, start_cli: Start
) -> None:
    (project / "told.py").write_text(ENVIRONMENT)
    raises = "{hook: on_train_batch_end, nth: 3, what: raise, rank: 1}"
    leader, follower = fit_on_both(
        wire,
        start_cli,
        "callbacks.2={class_path: told.Told}",
        f"callbacks.3={{class_path: rank_work.HappensHere, init_args: {raises}}}",
    )
    done, other = wait(leader, follower)
    assert (done.code, other.code) == (1, 1), f"{done}\n{other}"
    assert done.stderr.count("Traceback") == done.stderr.count("the user's own error in rank 1") == 1
    assert "Rank 1 on " in done.stderr
    assert "Traceback" not in other.stderr
    told = [json.loads((project / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert told == [["0", "0", "2", "1", "0", "2", "0"], ["1", "0", "2", "1", "1", "2", "0"]]


def test_a_second_press_at_the_follower_ends_all_at_once(wire: Wire, project: Path, start_cli: Start) -> None:
    hangs = "{hook: on_train_batch_end, nth: 3, what: hang, rank: 0}"
    leader, follower = fit_on_both(
        wire, start_cli, f"callbacks.2={{class_path: rank_work.HappensHere, init_args: {hangs}}}"
    )
    leader.wait_for_step(2, "demo")
    follower.signal(signal.SIGINT)
    leader.wait_for_output("Ctrl-C again ends without saving")  # it has come there
    time.sleep(SAME_PRESS_S + 0.1)  # closer together they are one press
    follower.signal(signal.SIGINT)
    for done in wait(leader, follower):
        assert done.code == 130, done
    assert "forced by a second Ctrl-C" in leader.stderr
    assert [live.survivors() for live in (leader, follower)] == [[], []]


def test_a_leader_that_cannot_start_tells_its_followers(wire: Wire, project: Path, start_cli: Start) -> None:
    for done in wait(*fit_on_both(wire, start_cli, "--ckpt", "step:7")):
        assert done.code == 3, done
        assert "step 7" in done.stderr
    assert not folder(project).exists()


def test_an_endpoint_that_nobody_serves(wire: Wire, project: Path, start_cli: Start) -> None:
    live = start_cli(
        "fit",
        "--nnodes",
        "2",
        "--rdzv-endpoint",
        wire.endpoint,
        "launch.rdzv_timeout_s=1",
        within=wire.within[1],
    )
    done = live.wait()
    assert done.code == 2, done
    assert f"nobody serves the rendezvous at {wire.endpoint}: Connection refused" in done.stderr
    assert "Is the same command started on 10.77.0.1" in done.stderr
