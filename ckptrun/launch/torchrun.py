"""How do several ranks run on this host? Membership from torch's elastic agent, processes from the fork server.

One loop in the supervisor's main thread: it hears the fork server, the agent and every rank, passes stop and save
requests on, and ends what does not end. It decides nothing about steps: ranks agree on those among themselves.

    rank's exit   with its last word "done" or "stopped"     fine, whatever the process does afterwards
                  with an error                              the others are given a moment, then ended
                  without a word                             lost
    rank stands still for longer than the limit              hung: stacks of all ranks, then all are ended
"""

from __future__ import annotations

import json
import os
import pickle
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ckptrun.environment.machine import oom_kills
from ckptrun.launch.blame import LostRankError, RankEnd, combine
from ckptrun.launch.fork_client import ForkServer
from ckptrun.launch.parent_death import adopt_orphans
from ckptrun.launch.rank_output import RankOutput
from ckptrun.launch.rank_process import RankJob, StoredPredictions
from ckptrun.launch.rank_state import Rank, dump_stacks, end_ranks
from ckptrun.launch.wire import Channel, Message
from ckptrun.processes import kill_descendants, reap_orphans
from ckptrun.records import Outcome, Progress, SavedCheckpoint, Stage, StopReason
from ckptrun.stop import StopListener, StopRequest

_POLL_MS = 200  # how exact times are kept; whatever happens wakes the loop at once
_AFTER_FAILURE_S = (
    5.0  # what other ranks get to end by themselves once one has failed; grace_s while they save
)
_AFTER_OUTCOME_S = 5.0  # what a rank's process gets to end after its last word
_LEFT_BEHIND_S = 1.0  # how long a rank may wait for one that ended in its set-up
# Where a rank is: one in which none of these moves stands still.
POSITION = ("stage", "step", "epoch", "batch", "eval_batch", "beats")
_BEFORE_WORK = (Stage.SETUP, Stage.RESTORE)


@dataclass
class Hooks:
    """Whom the loop tells; the supervisor's methods."""

    saved: Callable[[SavedCheckpoint], None]
    stage_changed: Callable[[], None]
    saving: Callable[[bool], None]
    save_served: Callable[[str | None, str | None, int], None]
    say: Callable[[str], None]
    output: Callable[[str, bool], None]  # a line that rank 0 printed, and whether on stderr
    first_step: Callable[[], None]
    restore_s: Callable[[float], None]
    ranks: Callable[[list[tuple[int, int, str]], list[int]], None]  # of all hosts; processes of this one


@dataclass
class Launch:
    """What is started: one job for each rank, and where their output goes."""

    nproc: int
    job: Callable[[int, int, int], RankJob]  # (rank, local rank, world size)
    log_path: Callable[[int], str]
    attempt: int
    run_id: str
    hang_timeout_s: float | None = None
    env: dict[str, str] = field(default_factory=dict)  # for every rank, besides what torchrun sets
    local: tuple[int, int] | None = (
        None  # local rank and how many, where this host's only rank is one of several there
    )


def rank_logs(logs_dir: str | None, attempt: int) -> Callable[[int], str]:
    """Where each rank's output goes: a file an attempt and rank; nowhere without ``logs_dir``."""
    if logs_dir is None:
        return lambda _: os.devnull
    return lambda rank: os.path.join(logs_dir, f"attempt-{attempt:04d}-rank-{rank:04d}.log")


class TorchrunLaunch:
    """One attempt of several ranks on this host."""

    def __init__(
        self, launch: Launch, server: ForkServer, *, listener: StopListener, progress: Progress, hooks: Hooks
    ) -> None:
        self._launch = launch
        self._server = server
        self._listener = listener
        self._progress = progress
        self._hooks = hooks
        self._ranks: dict[int, Rank] = {}
        self._by_id: dict[int, Rank] = {}
        self._by_pid: dict[int, Rank] = {}
        self._agent: Channel | None = None
        self._agent_id = 0
        self._agent_pid: int | None = None
        self._trouble: str | None = None  # why it cannot go on, where no rank is to blame
        self._hint: str | None = None  # what to do about it
        self._told_stop: StopRequest | None = None
        self._saves_told = 0
        self._failed_at: float | None = None
        self._ends = 0
        self._oom_kills = oom_kills()
        self._also: dict[int, Callable[[], None]] = {}  # what else to hear, by file descriptor
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)

    # -- the loop ----------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Start everything, watch it, and say how it ended. Nothing is left alive."""
        adopt_orphans()
        self._listener.on_change = self._wake
        try:
            self._start_agent()
            while not self._over():
                self._turn()
            return self._outcome()
        finally:
            self._end_all()
            adopt_orphans(False)

    def _turn(self) -> None:
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        if self._agent is not None and not self._agent.closed:
            poll.register(self._agent, select.POLLIN)
        for fd in self._also:
            poll.register(fd, select.POLLIN)
        by_channel, by_output = {}, {}
        for rank in self._ranks.values():
            if not rank.channel.closed:
                poll.register(rank.channel, select.POLLIN)
                by_channel[rank.channel.fileno()] = rank
            for fd in rank.output.fds():
                poll.register(fd, select.POLLIN)
                by_output[fd] = rank
        for fd, _ in poll.poll(_POLL_MS):
            if fd == self._woken.fileno():
                self._woken.recv(4096)
            elif fd == self._server.fileno():
                self._hear_server()
            elif self._agent is not None and not self._agent.closed and fd == self._agent.fileno():
                for message in self._agent.receive():
                    self._hear_agent(message)
            elif fd in self._also:
                self._also[fd]()
            elif fd in by_channel:
                self._hear_channel(by_channel[fd])
            elif fd in by_output:
                by_output[fd].output.hear(fd)
        self._pass_requests_on()
        self._watch()

    def _wake(self) -> None:
        """End the wait for something to hear: there is something to pass on. Callable from any thread."""
        try:
            self._waker.send(b"\0")
        except OSError:
            pass  # it is awake, or over

    def _over(self) -> bool:
        ranks = self._ranks.values()
        if ranks and all(rank.code is not None for rank in ranks):
            return True
        if self._server.closed:
            self._trouble = self._trouble or "the process that ranks are forked from is gone"
        if self._trouble is not None:
            # Whoever has said its last word is done with it all.
            return True
        # A stop that comes before any rank has started ends it here.
        return not ranks and self._listener.request is not None

    # -- starting ----------------------------------------------------------------------------------------

    def _start_agent(self) -> None:
        self._agent, theirs = Channel.pair()
        options = {
            "backend": "c10d",
            "endpoint": "localhost:0",
            "run_id": f"{self._launch.run_id}-{self._launch.attempt}",
            "nnodes": 1,
            "nproc": self._launch.nproc,
            "local_addr": "localhost",
        }
        self._agent_id = self._server.fork(
            "ckptrun.launch.elastic_agent:agent_main",
            json.dumps(options).encode(),
            env={},
            fds=[theirs.fileno()],
        )
        theirs.close()

    def _start_ranks(self, message: Message) -> None:
        for local_rank, rank, world_size in message["ranks"]:
            local_rank, num_local = self._launch.local or (local_rank, self._launch.nproc)
            env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(num_local),
                "GROUP_RANK": str(message["group_rank"]),
                "GROUP_WORLD_SIZE": str(message["group_world_size"]),
                "MASTER_ADDR": str(message["master_addr"]),
                "MASTER_PORT": str(message["master_port"]),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(self._launch.attempt - 1),
                "TORCHELASTIC_RUN_ID": self._launch.run_id,
                **self._launch.env,
            }
            channel, theirs = Channel.pair()
            output = RankOutput(self._launch.log_path(rank), self._hooks.output if rank == 0 else None)
            state = Rank(rank, channel, output)
            payload = pickle.dumps(self._launch.job(rank, local_rank, world_size))
            number = self._server.fork(
                "ckptrun.launch.rank_process:rank_main",
                payload,
                env=env,
                fds=[theirs.fileno(), *output.give()],
            )
            theirs.close()
            output.given()
            self._by_id[number] = state
            self._ranks[rank] = state
            self._tell_stop(state)

    # -- hearing -----------------------------------------------------------------------------------------

    def _hear_server(self) -> None:
        for message in self._server.receive():
            if message["op"] == "forked":
                self._forked(message)
            elif message["op"] == "refused":
                self._trouble = f"a rank could not be started: {message['why']}"
            elif message["op"] == "ended":
                if message["pid"] in self._by_pid:
                    self._ended(self._by_pid[message["pid"]], message["code"])
                elif message["pid"] == self._agent_pid and self._trouble is None:
                    self._trouble = (
                        "the process that keeps the ranks together (torch's elastic agent) is gone"
                    )

    def _forked(self, message: Message) -> None:
        if message["id"] == self._agent_id:
            self._agent_pid = message["pid"]
            if message["spawned_because"] is not None:
                self._hooks.say(
                    f"ranks begin as new interpreters, which takes longer: {message['spawned_because']}"
                )
            return
        rank = self._by_id[message["id"]]
        rank.pid = message["pid"]
        rank.moved_at = time.monotonic()
        self._by_pid[rank.pid] = rank
        self._started()

    def _started(self) -> None:
        """A rank has started; once all have, those who wait for that are told."""
        if all(state.pid is not None for state in self._ranks.values()):
            self._hooks.ranks(
                [(s.rank, s.pid or 0, s.host) for s in self._ranks.values()], list(self._by_pid)
            )
            if self._agent is not None:
                self._agent.send("acknowledged")

    def _hear_agent(self, message: Message) -> None:
        if message["op"] == "start":
            self._start_ranks(message)
        elif message["op"] == "stop" and self._agent is not None:
            self._agent.send("acknowledged")
        elif message["op"] == "failed":
            self._trouble = f"the ranks could not meet: {message['error']}"

    def _hear_channel(self, rank: Rank) -> None:
        for message in rank.channel.receive():
            self._hear_rank(rank, message)

    def _hear_rank(self, rank: Rank, message: Message) -> None:
        op = message.pop("op")
        if op == "signal":
            self._listener.count(message["signum"], f"rank {rank.rank}")
            return
        if op == "progress":
            self._hear_progress(rank, message)
            return
        rank.moved_at = time.monotonic()
        if op == "outcome":
            # What it printed before comes first, and is shown; what its libraries have to say at their end is not.
            rank.output.drain()
            rank.output.quiet = True
            rank.outcome, rank.outcome_at = message, time.monotonic()
            if message["error"] is not None:
                self._fail()
        elif op == "saving":
            rank.saving = message["saving"]
        if op == "say" and rank.rank != 0:
            rank.output.log(f"{message['text']}\n".encode())
        elif rank.rank == 0:
            self._hear_first_rank(op, message)

    def _hear_first_rank(self, op: str, message: Message) -> None:
        if op == "saved":
            self._hooks.saved(SavedCheckpoint(**message["saved"]))
        elif op == "saving":
            self._hooks.saving(message["saving"])
        elif op == "save_served":
            self._hooks.save_served(message["path"], message["error"], message["count"])
        elif op == "first_step":
            self._hooks.first_step()
        elif op == "say":
            self._hooks.say(message["text"])

    def _hear_progress(self, rank: Rank, message: Message) -> None:
        position = [message[name] for name in POSITION]
        if position != rank.position:
            rank.position, rank.moved_at = position, time.monotonic()
        rank.stage = message["stage"]
        if rank.rank != 0:
            return
        if "restore_s" in message:
            self._hooks.restore_s(message.pop("restore_s"))
        stage = Stage(message.pop("stage"))
        changed = stage is not self._progress.stage
        for name, value in message.items():
            setattr(self._progress, name, value)
        self._progress.stage = stage
        if changed:
            self._hooks.stage_changed()

    def _ended(self, rank: Rank, code: int) -> None:
        # Its last words may still be on their way.
        while not rank.channel.closed:
            self._hear_channel(rank)
        rank.output.close()
        rank.code = code
        self._ends += 1
        rank.order = self._ends
        if rank.outcome is None:
            rank.out_of_memory = code == -9 and not rank.ended_by_us and oom_kills() > self._oom_kills
            self._fail()
        elif code != 0 and rank.outcome["error"] is None:
            how = "had to be ended" if rank.ended_by_us else f"ended with {code}"
            self._hooks.say(f"rank {rank.rank} {how} after its work was done; that is not a failure")

    # -- passing on, watching ------------------------------------------------------------------------------

    def _tell_stop(self, rank: Rank) -> None:
        request = self._told_stop
        if request is not None:
            rank.channel.send(
                "stop", reason=str(request.reason), signum=request.signum, no_save=request.no_save
            )

    def _pass_requests_on(self) -> None:
        request = self._listener.request
        if request is not None and self._told_stop is None:
            self._told_stop = request
            for rank in self._ranks.values():
                self._tell_stop(rank)
        if self._listener.save_requested != self._saves_told and self._ranks:
            self._saves_told = self._listener.save_requested
            for rank in self._ranks.values():
                rank.channel.send("save", count=self._saves_told)

    def _fail(self) -> None:
        if self._failed_at is None:
            self._failed_at = time.monotonic()

    def _watch(self) -> None:
        now = time.monotonic()
        at_work = [rank for rank in self._ranks.values() if rank.runs and not rank.ended_by_us]
        silent = [rank for rank in at_work if rank.outcome is None]
        limit = self._launch.hang_timeout_s
        if limit is not None and any(now - rank.moved_at > limit for rank in silent):
            # One that hangs makes others wait for it, who then seem to hang as well: all who stand still are named.
            still = [rank for rank in silent if now - rank.moved_at > limit / 2]
            for rank in still:
                rank.stood_still_s = now - rank.moved_at
            self._fail()
            end_ranks(still, dump=True)
            return
        end_ranks([r for r in at_work if r.outcome and now - r.outcome_at > _AFTER_OUTCOME_S], dump=False)
        end_ranks([rank for rank in silent if self._waits_in_vain(rank, now)], dump=True)

    def _waits_in_vain(self, rank: Rank, now: float) -> bool:
        """Whether another rank has failed, or was stopped in its set-up, and this one had its time to notice."""
        if self._failed_at is not None:
            grace_s = self._listener.grace_s
            if any(other.outcome and not other.outcome["built"] for other in self._ranks.values()):
                grace_s = min(_LEFT_BEHIND_S, grace_s)  # nobody has begun: they are to meet that one first
            return now - self._failed_at > (grace_s if rank.saving else min(_AFTER_FAILURE_S, grace_s))
        if rank.stage not in _BEFORE_WORK or self._told_stop is None:
            return False
        return any(
            other.code is not None and now - other.outcome_at > _LEFT_BEHIND_S
            for other in self._ranks.values()
        )

    def dump_stacks(self) -> None:
        """Make all ranks write the stacks of their threads to their logs; callable from any thread."""
        dump_stacks(list(self._ranks.values()))

    # -- the end -------------------------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        ranks = list(self._ranks.values())
        step = self._progress.step
        if self._trouble is not None and not (ranks and all(rank.outcome is not None for rank in ranks)):
            error = LostRankError(self._trouble, hint=self._hint)
            error.none_begun = not ranks
            return Outcome(StopReason.RANK_LOST, step, error=error)
        if not ranks:
            request = self._listener.request
            return Outcome(StopReason.RANK_LOST if request is None else request.reason)
        outcome = combine(
            [
                RankEnd(
                    s.rank,
                    s.host,
                    s.outcome,
                    None if s.code_unknown else s.code,
                    s.order,
                    s.out_of_memory,
                    s.stood_still_s,
                    s.ended_by_us,
                    s.host_lost,
                )
                for s in ranks
            ],
            step=step,
            logs=os.path.dirname(self._launch.log_path(0)),
        )
        first = self._ranks[0].outcome if 0 in self._ranks else None
        if first is not None and first["results_path"] is not None:
            return replace(outcome, results=StoredPredictions(first["results_path"]))
        return outcome

    def _end_all(self) -> None:
        if self._agent is not None:
            done = all(r.outcome is not None and r.outcome["error"] is None for r in self._ranks.values())
            self._agent.send("state", state="SUCCEEDED" if done and self._ranks else "FAILED")
            self._agent.close()
        end_ranks([rank for rank in self._ranks.values() if rank.runs], dump=False)
        self._server.sweep()
        if self._server.closed:
            # What it had started came here when it was killed.
            kill_descendants()
            reap_orphans()
        for rank in self._ranks.values():
            rank.channel.close()
            rank.output.close()
        self._listener.on_change = lambda: None
        self._waker.close()
        self._woken.close()
