"""What tests of several ranks share: a work that ranks can be sent, a session around it, and a picture of its end.

Ranks are real processes on a gloo group; they come from one fork server for a whole test module, so that torch is
imported once. A :class:`Work` is pickled and sent to them; what happens where is said by :class:`Event`.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler, default_collate

from ckptrun import Callback, DataModule, Module, StopTraining
from ckptrun.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from ckptrun.checkpoint.catalogue import Catalogue
from ckptrun.checkpoint.state_file import read_state
from ckptrun.errors import SaveError
from ckptrun.launch.fork_client import ForkServer
from ckptrun.launch.plan import LaunchPlan
from ckptrun.records import CheckpointRecord, Fn, Outcome
from ckptrun.run.folder import RunFolder
from ckptrun.session.spec import SessionResult, SessionSpec
from ckptrun.session.story import run_session
from ckptrun.stop import StopListener

NUM_SAMPLES, BATCH = 44, 4  # of 2 ranks: 5 steps of 8 samples and one of 4, an epoch


@dataclass(frozen=True)
class Event:
    """``what`` happens in rank ``rank`` (None: in each) the ``nth`` time that ``hook`` is called there.

    ``what``: ``sigint``, ``sigterm``, ``sigusr1`` or ``sigusr2`` to this process, and wait until all know of it;
    ``wait`` until this rank knows of a stop; ``raise``; ``sigkill``; ``exit``; ``hang``; ``stop training``; ``should
    stop``; ``leave grandchildren``; ``abort at exit``; ``sleep at exit``; ``print``; ``kill the fork server``; ``kill
    the agent``.
    ``once`` is a file: nothing happens where it exists. The hook ``build`` stands before anything is built.
    """

    hook: str
    nth: int
    what: str
    rank: int | None = None
    once: str | None = None
    step: int | None = None  # only where so many steps are done


class Happens(Callback):
    """Lets an event happen."""

    def __init__(self, event: Event) -> None:
        self._event = event
        self._left = event.nth
        if event.hook == "build":
            return
        setattr(self, event.hook, self._count)

    @property
    def state_key(self) -> str:
        return f"Happens{self._event}"

    def _count(self, trainer: Any, *_: Any) -> None:
        event = self._event
        if event.step is not None and trainer.global_step != event.step:
            return
        self._left -= 1
        if self._left or event.rank not in (None, trainer.global_rank):
            return
        if event.once is not None:
            if os.path.exists(event.once):
                return
            Path(event.once).touch()
        act(event.what, trainer)


def act(what: str, trainer: Any) -> None:
    """Do what :class:`Event` describes."""
    stop = trainer.context.stop
    saves = stop.save_requested
    if what in ("sigint", "sigterm", "sigusr1", "sigusr2"):
        os.kill(os.getpid(), getattr(signal, what.upper()))
    if what in ("sigint", "sigterm", "sigusr1", "wait"):
        _until(lambda: stop.request is not None)
    elif what == "sigusr2":
        _until(lambda: stop.save_requested > saves)
    elif what == "raise":
        raise RuntimeError(f"the user's own error in rank {trainer.global_rank}")
    elif what == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "exit":
        os._exit(3)
    elif what == "hang":
        while True:
            time.sleep(60)
    elif what == "stop training":
        raise StopTraining
    elif what == "should stop":
        trainer.should_stop = True
    elif what == "leave grandchildren":
        command = ["sh", "-c", f"sleep 1000; : {trainer.context.run.path}"]
        subprocess.Popen(command)
        subprocess.Popen(command, start_new_session=True)
    elif what == "kill the fork server":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    elif what == "kill the agent":
        children = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
        os.kill(min(map(int, children)), signal.SIGKILL)
        time.sleep(60)
    elif what == "abort at exit":
        import atexit

        atexit.register(os.abort)
    elif what == "sleep at exit":
        import atexit

        atexit.register(time.sleep, 1000)
    elif what == "print":
        import sys

        trainer.context.say(f"said by rank {trainer.global_rank}")
        print(f"out of rank {trainer.global_rank}", flush=True)
        print(f"err of rank {trainer.global_rank}", file=sys.stderr, flush=True)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def samples(count: int = NUM_SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=generator)
    return TensorDataset(x, x @ torch.randn(4, 2, generator=generator), torch.arange(count))


class Augmented(Dataset[Any]):
    """Draws from all global random states for each sample."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        x, y, which = samples()[index]
        return x + torch.rand(4) + random.random() + float(np.random.rand()), y, which


def noisy_collate(items: Any) -> Any:
    """Draws for each batch."""
    x, y, which = default_collate(items)
    return x + 0.1 * torch.randn(4), y, which


class Data(DataModule):
    """Shuffled training data, and evaluation data that does not divide evenly."""

    def __init__(
        self,
        *,
        weighted: bool = False,
        num_workers: int = 0,
        evaluated: int = 21,
        trained: int = NUM_SAMPLES,
        augmented: bool = False,
        batch: int = BATCH,
    ) -> None:
        super().__init__()
        self.batch = batch
        self.augmented = augmented
        self.weighted, self.num_workers, self.evaluated = weighted, num_workers, evaluated
        self.trained = trained

    def train_dataloader(self) -> Any:
        data: Any = Augmented() if self.augmented else samples(self.trained)
        if self.weighted:
            sampler = WeightedRandomSampler(torch.arange(1.0, len(data) + 1).tolist(), len(data))
            return DataLoader(data, batch_size=self.batch, sampler=sampler, num_workers=self.num_workers)
        collate = noisy_collate if self.augmented else None
        return DataLoader(
            data, batch_size=self.batch, shuffle=True, num_workers=self.num_workers, collate_fn=collate
        )

    def val_dataloader(self) -> Any:
        return DataLoader(samples(self.evaluated), batch_size=BATCH)

    test_dataloader = predict_dataloader = val_dataloader


class Model(Module):
    """What makes several ranks hard: dropout, BatchNorm, random augmentation, values that differ between ranks."""

    def __init__(
        self,
        *,
        manual: bool = False,
        scheduler: str = "epoch",
        skips_on: tuple[int, ...] = (),
        overflows: bool = False,
        lr: float = 0.02,
        optimizer: bool | str = True,
        norm: bool = True,
        random: bool = True,
    ) -> None:
        super().__init__()
        self.random = random
        self.optimizer = optimizer
        self.lr = lr
        self.overflows = overflows
        between = nn.BatchNorm1d(8) if norm else nn.Tanh()
        self.net = nn.Sequential(
            nn.Linear(4, 8), between, nn.Dropout(0.4 if random else 0.0), nn.Linear(8, 2)
        )
        self.automatic_optimization = not manual
        self.scheduler = scheduler
        self.skips_on = skips_on  # ranks whose third batch has no loss
        self.seen: list[int] = []

    def loss(self, batch: Any) -> torch.Tensor:
        x, y, _ = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        return loss * 1e9 if self.overflows and self.training and self.global_step in (2, 8, 13) else loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, which = batch
        self.seen += which.tolist()
        loss = self.loss((x + (0.1 * torch.randn_like(x) if self.random else 0), y, which))
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("rank_loss", loss, on_step=True, on_epoch=False)
        self.log("synced_loss", loss, on_step=True, on_epoch=False, sync_dist=True)
        if self.automatic_optimization:
            return None if batch_idx == 2 and self.trainer.global_rank in self.skips_on else loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        again = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(again)
        optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("test_loss", loss)
        self.log("test_max", loss, reduce_fx="max")
        self.log("count", float(len(batch[0])), reduce_fx="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"which": batch[2], "y": self.net(batch[0])}

    def _optimizer(self) -> torch.optim.Optimizer:
        first, *others = self.parameters()
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=self.lr)
        groups = {
            "two groups": [{"params": [first]}, {"params": others}],
            "other groups": [{"params": others}, {"params": [first]}],
        }
        return torch.optim.Adam(groups.get(str(self.optimizer), self.parameters()), lr=self.lr)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        if not self.optimizer:
            return None
        optimizer = self._optimizer()
        if self.scheduler == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            config = {"scheduler": plateau, "monitor": "rank_loss", "interval": "step", "strict": False}
            return {"optimizer": optimizer, "lr_scheduler": config}
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)]


class Seen(Callback):
    """Writes which samples this rank has trained on."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        path = Path(self._folder) / f"epoch-{trainer.current_epoch}-rank-{trainer.global_rank}"
        path.write_text(" ".join(map(str, pl_module.seen)))
        pl_module.seen.clear()


class FailingCommits(Callback):
    """Commits with these numbers fail in the rank that writes; each rank notes its books at the end of each epoch."""

    def __init__(self, folder: str, *numbers: int) -> None:
        self._folder, self._numbers = folder, numbers

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        from ckptrun.fit import checkpoint_writer

        real, count = checkpoint_writer.commit, itertools.count(1)

        def commit(*args: Any, **options: Any) -> Any:
            if next(count) in self._numbers:
                raise SaveError("the disk is away")
            return real(*args, **options)

        checkpoint_writer.commit = commit

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.checkpoints.settle()
        books = [sorted(map(os.path.basename, c.best_k_models)) for c in trainer.checkpoint_callbacks]
        path = Path(self._folder) / f"rank-{trainer.global_rank}"
        with path.open("a") as file:
            file.write(f"{trainer.current_epoch} {books}\n")


def with_failing_commit(folder: str) -> list[Callback]:
    """The second save fails."""
    return [ModelCheckpoint(monitor="val_loss", save_top_k=-1), FailingCommits(folder, 2)]


class _InBuild:
    """What an event needs of a trainer, before there is one."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.global_rank = context.rank


@dataclass(frozen=True)
class Work:
    """The work of each rank. ``every_step``: ranks ask each other in every step, so that a stop comes at once."""

    fn: Fn = "fit"
    events: tuple[Event, ...] = ()
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], Sequence[Callback]] | None = None
    every_step: bool = True
    patience_s: float = 10.0  # of ranks that wait for the others to do the same
    may_end_badly: bool = False  # a process may abort after its work is done

    def __call__(self, context: Any) -> Outcome:
        import ckptrun.fit.agreement
        import ckptrun.fit.trainer
        from ckptrun.fit.rank_main import Built, run_rank

        if self.every_step:
            ckptrun.fit.agreement.ASK_EVERY_S = 0.0
        ckptrun.fit.agreement.WISH_S = ckptrun.fit.trainer.ALONE_S = self.patience_s
        for event in self.events:
            if event.hook == "build" and event.rank in (None, context.rank):
                act(event.what, _InBuild(context))
        options = {"max_epochs": 3, "seed": 7, "log_every_n_steps": 1, "num_threads": 1, **self.options}
        return run_rank(context, fn=self.fn, options=options, build=lambda: self._build(Built))

    def _build(self, built: Any) -> Any:
        made = list((self.callbacks or standard_callbacks)())
        return built(
            model=self._model(),
            data=Data(**self.data),
            callbacks=[*made, *map(Happens, self.events)],
            strategy_options=self.strategy,
        )

    def _model(self) -> Any:
        return Model(**self.model)


def standard_callbacks() -> list[Callback]:
    return [ModelCheckpoint(monitor="val_loss", save_top_k=2), EarlyStopping("val_loss", patience=10)]


class Slowly(Callback):
    """Each batch takes a little, so that a test has time to do something meanwhile."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(self._seconds)


def with_exception_checkpoint() -> list[Callback]:
    return [*standard_callbacks(), OnExceptionCheckpoint()]


# -- sessions ------------------------------------------------------------------------------------------------


class SharedServer(ForkServer):
    """A fork server that outlives the sessions that use it."""

    def close(self) -> None:
        if not self.ready or self.closed:
            super().close()

    def end(self) -> None:
        super().close()


@contextmanager
def shared_server(method: str = "fork", **env: str) -> Iterator[SharedServer]:
    """One server for several sessions."""
    server = SharedServer.start({"OMP_NUM_THREADS": "1", **env}, method=method)
    assert isinstance(server, SharedServer)
    try:
        yield server
    finally:
        server.end()


@dataclass
class Played:
    """What came of a session, and what it said."""

    result: SessionResult
    folder: RunFolder
    said: list[str]
    printed: list[tuple[str, bool]]

    @property
    def outcome(self) -> Outcome:
        assert self.result.outcome is not None
        return self.result.outcome

    @property
    def code(self) -> int:
        return self.result.exit_code

    def logs(self, attempt: int = 1) -> list[str]:
        """What each rank's log holds."""
        paths = sorted(Path(self.folder.logs_dir).glob(f"attempt-{attempt:04d}-rank-*.log"))
        return [path.read_text() for path in paths]

    def checkpoints(self) -> list[CheckpointRecord]:
        """The committed ones, newest first."""
        return checkpoints(self.folder)


def play(
    server: ForkServer,
    root: Path,
    run: str,
    work: Work,
    *,
    reference: str | None = None,
    num_ranks: int = 2,
    listener: StopListener | None = None,
    strategy: str = "ddp",
    **spec: Any,
) -> Played:
    """One command's session."""
    said: list[str] = []
    printed: list[tuple[str, bool]] = []
    folder = RunFolder.at(str(root), run)
    plan = LaunchPlan("torchrun", strategy, num_ranks, ("ckptrun", work.fn))
    result = run_session(
        SessionSpec(
            fn=work.fn,
            folder=folder,
            rank_main=work,
            listener=listener or StopListener(),
            plan=plan,
            reference=reference,
            command=spec.pop("command", ("ckptrun", work.fn)),
            echo=said.append,
            output=lambda line, is_error: printed.append((line, is_error)),
            fork_server=server,
            zero_stage=work.strategy.get("stage", 2) if strategy == "deepspeed" else None,
            takes_full_weights=work.strategy.get("load_full_weights", False),
            **spec,
        )
    )
    if work.may_end_badly:
        return Played(result, folder, said, printed)
    assert not [text for text in said if "after its work was done" in text]
    return Played(result, folder, said, printed)


def alive(folder: RunFolder) -> list[str]:
    """Commands of living processes that name the run's folder."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if folder.path in command and state not in "ZX":
                found.append(f"{name} {command}")
    return found


def checkpoints(folder: RunFolder) -> list[CheckpointRecord]:
    catalogue = Catalogue(folder.checkpoints_dir)
    examined = [catalogue.examine(name) for name in catalogue.names()]
    return [record for record in examined if isinstance(record, CheckpointRecord)]


def picture(folder: RunFolder) -> dict[str, Any]:
    """All that has to be equal, bit for bit, at the end of two trainings."""
    newest = checkpoints(folder)[0]
    state = read_state(os.path.join(newest.path, "state.ckpt"))
    ranks = {
        name: read_state(os.path.join(newest.path, name))
        for name in sorted(os.listdir(newest.path))
        if name.startswith("rank-")
    }
    loop = {key: value for key, value in state["loops"]["fit_loop"].items() if key != "elapsed_s"}
    table = Path(folder.logs_dir) / "metrics.csv"
    return {
        "step": newest.step,
        "metrics": newest.metrics,
        **{
            name: state.get(name)
            for name in ("state_dict", "optimizer_states", "optimizer_groups", "lr_schedulers", "epoch")
        },
        "shards": _shards(newest.path),
        "loop": loop,
        "logs": state["ckptrun"]["logs"],
        "early stopping": [v for k, v in state["callbacks"].items() if k.startswith("EarlyStopping")],
        "best": [
            {key: value for key, value in v.items() if "score" in key}
            for k, v in state["callbacks"].items()
            if k.startswith("ModelCheckpoint")
        ],
        "ranks": ranks,
        "table": table.read_text() if table.exists() else "",
    }


def _shards(folder: str) -> dict[str, Any]:
    """The content of DeepSpeed's files, its objects as their fields."""
    found = {}
    for path in sorted(Path(folder).glob("global_step*/*.pt")):
        state = torch.load(path, weights_only=False)  # written by the test itself
        state.pop("ds_config")
        found[str(path.relative_to(folder))] = _plain(state)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _plain(vars(value)) if type(value).__module__.startswith("deepspeed.runtime.fp16") else value


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Equal in every bit (NaN equals NaN)."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor), where
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b) or torch.allclose(a, b, 0, 0, equal_nan=True), f"{where}: {a} != {b}"
    elif isinstance(a, dict):
        assert list(a) == list(b), f"{where}: {list(a)} != {list(b)}"
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for index, (one, two) in enumerate(zip(a, b, strict=True)):
            assert_same(one, two, f"{where}[{index}]")
    else:
        assert a == b, f"{where}: {a} != {b}"


class HappensHere(Happens):
    """An event as a config writes it."""

    def __init__(
        self, hook: str, nth: int, what: str, rank: int | None = None, once: str | None = None
    ) -> None:
        super().__init__(Event(hook, nth, what, rank, once))
