"""What does a user write to say where data comes from? :class:`DataModule`, under Lightning's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptrun.fit.module import DataHooks, HyperParametersMixin

if TYPE_CHECKING:
    from ckptrun.fit.trainer import Trainer


class DataModule(HyperParametersMixin, DataHooks):
    """Loaders for the four fns. Names, arguments and meaning are those of ``LightningDataModule``."""

    trainer: Trainer | None = None

    def prepare_data(self) -> None:
        """Download or build what is on disk; called on one process of a host, before ``setup``."""

    def setup(self, stage: str) -> None:
        """Open datasets; called on every process. ``stage`` is fit, validate, test or predict."""

    def teardown(self, stage: str) -> None:
        """Close what ``setup`` opened."""

    def train_dataloader(self) -> Any:
        """Return the loader to train on."""

    def val_dataloader(self) -> Any:
        """Return a loader or a list of them."""

    def test_dataloader(self) -> Any:
        """Return a loader or a list of them."""

    def predict_dataloader(self) -> Any:
        """Return a loader or a list of them."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint should keep of this datamodule."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when training ends by an exception."""
