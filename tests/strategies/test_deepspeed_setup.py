"""What is refused before DeepSpeed's engine is made?"""

from __future__ import annotations

import pytest
import torch

from ckptrun.errors import MisconfigurationException
from ckptrun.strategies.deepspeed import DeepSpeedStrategy

pytestmark = pytest.mark.deepspeed


def test_in_stage_3_every_trained_parameter_is_the_optimizers() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    net[0].bias.requires_grad_(False)
    optimizer = torch.optim.Adam(net[1].parameters())
    with pytest.raises(MisconfigurationException, match=r"^0\.weight: trained, and in no group"):
        DeepSpeedStrategy(stage=3).setup(net, [optimizer])  # type: ignore[arg-type]
