# ruff: noqa: ARG002 - a hook has the trainer's arguments, and save_hyperparameters() reads those of __init__
"""How is a byte-level GPT trained on the standard library's source? ``configs/stdlib_gpt.yaml`` runs this.

Quality is told in bits per byte: what the model needs, on average, to write down one byte of text that it has
never seen. Beside it stands what a model needs that knows only how often each byte occurs. Both are averaged
over the very same bytes, so that the two numbers can be compared.
"""

from __future__ import annotations

import math
import platform
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that PyTorch's users know
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from ckptrun import DataModule, Module
from ckptrun.errors import MisconfigurationException
from ckptrun.examples.gpt import GPT, NUM_BYTES
from ckptrun.examples.stdlib_corpus import END_OF_FILE, Corpus, read_corpus

_BITS = 1 / math.log(2)  # bits in a nat
_PROMPTS = ("import ", "def ", "class ", "    if ", "    for ", "try:\n")


class StdlibGPT(Module):
    """The GPT with its loss, optimizer, schedule and way of writing.

    Args:
        width, depth, heads, context, dropout: see :class:`ckptrun.examples.gpt.GPT`.
        lr: the highest learning rate.
        warmup_steps: steps over which the rate rises from zero to ``lr``.
        decay_steps: step at which it has fallen, along half a cosine, to ``final_lr_ratio`` of ``lr``; there
            it stays. A number of its own and not ``trainer.max_steps``, so that a run can be made longer.
        final_lr_ratio: see ``decay_steps``.
        weight_decay: on matrices; vectors have none.
        temperature, top_k, num_bytes: how ``predict`` draws, and how many bytes it writes for each prompt.
    """

    def __init__(
        self,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        context: int = 128,
        dropout: float = 0.0,
        lr: float = 3e-3,
        warmup_steps: int = 60,
        decay_steps: int = 1000,
        final_lr_ratio: float = 0.05,
        weight_decay: float = 0.1,
        temperature: float = 0.8,
        top_k: int = 40,
        num_bytes: int = 300,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.gpt = GPT(width, depth, heads, context, dropout)
        self.byte_bits: Tensor | None = None  # [256], where the data says it

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.gpt(tokens)
        return logits

    def setup(self, stage: str) -> None:
        data = self.trainer.datamodule
        self.byte_bits = data.byte_bits if isinstance(data, StdlibBytes) else None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._nats(batch)
        self.log("train_bpb", loss.detach() * _BITS, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_bpb", self._nats(batch) * _BITS, on_step=False, on_epoch=True, prog_bar=True)
        if self.byte_bits is not None:
            baseline = self.byte_bits.to(batch[1].device)[batch[1]].mean()
            self.log("baseline_bpb", baseline, on_step=False, on_epoch=True, prog_bar=True)

    def predict_step(self, batch: str, batch_idx: int) -> str:
        """Go on from one prompt; the text is returned with the prompt in front."""
        written = self.gpt.generate(
            ("\n" + batch).encode(),
            self.hparams.num_bytes,
            temperature=self.hparams.temperature,
            top_k=self.hparams.top_k,
            end=END_OF_FILE[0],
        )
        return batch + written.decode("utf-8", "replace")

    def configure_optimizers(self) -> dict[str, Any]:
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self.hparams.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=self.hparams.lr,
            betas=(0.9, 0.95),
        )
        scheduler = LambdaLR(optimizer, self._lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_fit_end(self) -> None:
        found = self.trainer.callback_metrics
        if "val_bpb" in found and "baseline_bpb" in found:
            self.print(
                f"validation: {float(found['val_bpb']):.2f} bits per byte; "
                f"a byte-frequency model needs {float(found['baseline_bpb']):.2f}"
            )

    def _nats(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1).float(), targets.flatten())

    def _lr_factor(self, step: int) -> float:
        warmup = min(1.0, (step + 1) / max(1, self.hparams.warmup_steps))
        done = min(1.0, step / max(1, self.hparams.decay_steps))
        final: float = self.hparams.final_lr_ratio
        factor: float = warmup * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done)))
        return factor


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text: each index is a place in it, and the same place every time.

    An item is (bytes, the bytes one further on), both int64 [context].
    """

    def __init__(self, text: Tensor, context: int, starts: Sequence[int]) -> None:
        self.text = text
        self.context = context
        self.starts = starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = self.starts[index]
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class StdlibBytes(DataModule):
    """Windows of the standard library's source.

    Args:
        context: bytes in a window; at most the model's.
        batch_size: windows in a batch.
        num_val_windows: windows of the held-out files, spread evenly over them; the same ones each time.
        num_workers: worker processes of each loader.
        prompts: what ``predict`` goes on from, one text for each; None takes a few beginnings of code.
        root: another folder with Python files.
    """

    def __init__(
        self,
        context: int = 128,
        batch_size: int = 16,
        num_val_windows: int = 256,
        num_workers: int = 0,
        prompts: list[str] | None = None,
        root: str | None = None,
    ) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.num_val_windows = num_val_windows
        self.num_workers = num_workers
        self.prompts = list(_PROMPTS) if prompts is None else prompts
        self.root = root
        self.byte_bits: Tensor | None = None  # [256] bits that a byte-frequency model needs for each byte
        self._corpus: Corpus | None = None
        self._expected: dict[str, str] | None = None  # what a checkpoint says the text was

    def setup(self, stage: str) -> None:
        if stage == "predict" or self._corpus is not None:
            return
        corpus = read_corpus(self.root)
        self._corpus = corpus
        # A bytearray, because torch warns about tensors on memory that cannot be written.
        self._train = torch.frombuffer(bytearray(corpus.train), dtype=torch.uint8)
        self._val = torch.frombuffer(bytearray(corpus.val), dtype=torch.uint8)
        counts = (
            torch.bincount(self._train, minlength=NUM_BYTES) + 1
        )  # one more, so that no byte is impossible
        self.byte_bits = -torch.log2(counts / counts.sum())
        self._compare()

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        starts = range(0, len(self._train) - self.context, self.context)
        return self._loader(Windows(self._train, self.context, starts), train=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        everywhere = range(0, len(self._val) - self.context, self.context)
        num = min(self.num_val_windows, len(everywhere))
        if num < 1:
            raise MisconfigurationException(
                f"no validation window: num_val_windows is {self.num_val_windows} and the held-out text has "
                f"{len(everywhere)} windows of {self.context} bytes."
            )
        starts = [everywhere[i * len(everywhere) // num] for i in range(num)]
        return self._loader(Windows(self._val, self.context, starts), train=False)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        raise MisconfigurationException(
            "there is no test data beside the validation data.", hint="Use 'ckptrun validate'."
        )

    def predict_dataloader(self) -> DataLoader[str]:
        # One prompt at a time: a request to stop is seen after each.
        return DataLoader(self.prompts, batch_size=None)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        if self._corpus is None:
            return {}
        return {"fingerprint": self._corpus.fingerprint, "python": platform.python_version()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._expected = state_dict or None
        self._compare()

    def _compare(self) -> None:
        """Say so where the text is not the one that the checkpoint was trained on."""
        if self._expected is None or self._corpus is None:
            return
        found = self._corpus.fingerprint
        if self._expected["fingerprint"] != found:
            warnings.warn(
                f"the checkpoint was trained on the library of Python {self._expected['python']} "
                f"(text {self._expected['fingerprint']}), this is Python {platform.python_version()} "
                f"(text {found}): what follows is not what an undisturbed run would have given.",
                stacklevel=2,
            )
            self._expected = None  # once is enough

    def _loader(self, windows: Windows, *, train: bool) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(
            windows,
            batch_size=self.batch_size if train else 2 * self.batch_size,
            shuffle=train,
            drop_last=train,
            num_workers=self.num_workers,
        )
