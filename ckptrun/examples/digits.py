# ruff: noqa: ARG002 - a hook has the trainer's arguments, and save_hyperparameters() reads those of __init__
"""How is a small classifier trained in seconds? On the handwritten digits that scikit-learn ships;
``configs/digits.yaml`` runs this.

1,797 pictures of 8 by 8 pixels (the test part of UCI's "Optical Recognition of Handwritten Digits"), split
once and for all into training, validation and test.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that PyTorch's users know
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ckptrun import DataModule, Module
from ckptrun.errors import MisconfigurationException

_NUM_VAL = 300
_NUM_TEST = 300


class DigitsClassifier(Module):
    """A perceptron over the pixels of a digit.

    Args:
        width: units in each of the two hidden layers.
        dropout: share of hidden units dropped in training.
        lr: the learning rate at the start; halved each time ``val_loss`` has stood still for two epochs.
    """

    def __init__(self, width: int = 64, dropout: float = 0.2, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, 10),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits [batch, 10] for pixels [batch, 64] between 0 and 1."""
        logits: Tensor = self.net(pixels)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The digit [batch] that is seen in each picture."""
        return self(batch[0]).argmax(dim=1)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    def _evaluate(self, batch: tuple[Tensor, Tensor], name: str) -> None:
        pixels, digits = batch
        logits = self(pixels)
        right = (logits.argmax(dim=1) == digits).float().mean()
        self.log(f"{name}_loss", F.cross_entropy(logits, digits), on_step=False, on_epoch=True)
        self.log(f"{name}_acc", right, on_step=False, on_epoch=True, prog_bar=True)


class Digits(DataModule):
    """The digits as tensors: pixels float32 [64] between 0 and 1, and the digit as int64.

    Args:
        batch_size: pictures in a batch of training.
        num_workers: worker processes of each loader.
    """

    def __init__(self, batch_size: int = 32, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise MisconfigurationException(
                "the digits come with scikit-learn, which is not installed.",
                hint="Install it: pip install 'ckptrun[examples]'",
            ) from None
        pixels, digits = load_digits(return_X_y=True)
        # A generator of its own: the split must be the same whatever the seed of the run.
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
        val, test, train = order.tensor_split([_NUM_VAL, _NUM_VAL + _NUM_TEST])
        whole = torch.from_numpy(pixels).float() / 16, torch.from_numpy(digits).long()
        self.train, self.val, self.test = (TensorDataset(*(t[i] for t in whole)) for i in (train, val, test))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader(self.val)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader(self.test)

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader(self.test)

    def _loader(self, part: TensorDataset, *, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
        size = self.batch_size if shuffle else _NUM_VAL
        return DataLoader(part, batch_size=size, shuffle=shuffle, num_workers=self.num_workers)
