"""The base class: Lightning's hooks under Lightning's names, and how a state finds its callback again."""

from __future__ import annotations

import inspect
import subprocess
import sys

import ckptrun.callbacks
import ckptrun.loggers
from ckptrun.fit.callback import Callback

# Lightning 2.6's hooks with the names of their arguments.
HOOKS = {
    "setup": "trainer pl_module stage",
    "teardown": "trainer pl_module stage",
    **dict.fromkeys(
        [
            f"on_{what}_{when}"
            for what in (
                *("fit", "sanity_check", "train", "train_epoch", "validation", "validation_epoch"),
                *("test", "test_epoch", "predict", "predict_epoch"),
            )
            for when in ("start", "end")
        ],
        "trainer pl_module",
    ),
    "on_train_batch_start": "trainer pl_module batch batch_idx",
    "on_train_batch_end": "trainer pl_module outputs batch batch_idx",
    **dict.fromkeys(
        [f"on_{what}_batch_start" for what in ("validation", "test", "predict")],
        "trainer pl_module batch batch_idx dataloader_idx",
    ),
    **dict.fromkeys(
        [f"on_{what}_batch_end" for what in ("validation", "test", "predict")],
        "trainer pl_module outputs batch batch_idx dataloader_idx",
    ),
    "on_exception": "trainer pl_module exception",
    "on_save_checkpoint": "trainer pl_module checkpoint",
    "on_load_checkpoint": "trainer pl_module checkpoint",
    "on_before_backward": "trainer pl_module loss",
    "on_after_backward": "trainer pl_module",
    "on_before_optimizer_step": "trainer pl_module optimizer",
    "on_before_zero_grad": "trainer pl_module optimizer",
    "state_dict": "",
    "load_state_dict": "state_dict",
}


def test_has_every_hook_of_lightning_and_no_other() -> None:
    found = {
        name: " ".join(list(inspect.signature(function).parameters)[1:])
        for name, function in vars(Callback).items()
        if inspect.isfunction(function) and not name.startswith("_")
    }
    assert found == HOOKS


def test_every_hook_is_empty() -> None:
    callback = Callback()
    for name, arguments in HOOKS.items():
        result = getattr(callback, name)(*arguments.split())
        assert result == ({} if name == "state_dict" else None)


def test_state_key_is_the_class_and_what_tells_two_apart() -> None:
    class Plain(Callback):
        pass

    class Several(Callback):
        @property
        def state_key(self) -> str:
            return self._generate_state_key(decay=0.9)

    assert Callback().state_key == "Callback"
    assert Plain().state_key.endswith(".Plain")
    assert Several().state_key.endswith(".Several{'decay': 0.9}")


def test_users_find_every_callback_and_logger() -> None:
    for module in (ckptrun.callbacks, ckptrun.loggers):
        for name in module.__all__:
            assert getattr(module, name).__name__ == name
            assert name in dir(module)
        assert not hasattr(module, "Nothing")


def test_names_can_be_listed_without_torch() -> None:
    code = (
        "import sys, ckptrun.callbacks as c, ckptrun.loggers as l;"
        "dir(c), dir(l); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
