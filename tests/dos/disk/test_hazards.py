"""What is under way while state goes to disk is neither lost nor overwritten."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from dos import DOSAdam
from tests.support.training import Make, bits, leaving_early, maker


def _with_a_newcomer(make: Make) -> list[Tensor]:
    """Parameters after steps, from the third of which on others are updated, too, whose state is larger."""
    old, new = nn.Parameter(torch.randn(32768)), nn.Parameter(torch.randn(16384))
    optimizer = make([old])
    for step in range(5):
        if step == 2:
            optimizer.add_param_group({"params": [new], "amsgrad": True})
        ((old.sin() * step).sum() + (new.cos().sum() if step >= 2 else 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return [old, new]


def test_gradients_that_left_for_a_home_which_goes_to_disk_are_sent_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings = {"subgroup_size": 2048, "disk": tmp_path, "host_memory": 400_000}
    with torch.random.fork_rng():
        expected = bits(_with_a_newcomer(DOSAdam))
    with leaving_early() as early:
        found = bits(_with_a_newcomer(maker("cpu", **settings)))
    assert early
    assert found == expected
