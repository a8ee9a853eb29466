"""Forward and backward layer by layer, with collectives and copies of FSDP2 beside the compute.

Each function walks through the layers once, keeping for every lane the moment until which it is
busy. Each layer takes an equal part of the whole on a lane.
"""

from __future__ import annotations

from typing import NamedTuple


class Pass(NamedTuple):
    """One pass through the model, in seconds for all layers together.

    compute: of the layers themselves.
    up: copying shards to the device, where parameters are on the host. gather: all-gathers.
    reduce: reduce-scatters, or all-reduces without sharding; they share a communicator, and so a lane, with the
        all-gathers.
    down: copying gradient shards to the host, where parameters are.
    """

    compute: float
    up: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    down: float = 0.0

    def of_a_layer(self, layers: int) -> Pass:
        """An equal part of everything."""
        return Pass(*(part / layers for part in self))


def forward_s(whole: Pass, layers: int, updated: float = 0.0) -> float:
    """Seconds of forward.

    While a layer computes, the next one's all-gather runs (FSDP2's implicit forward prefetch; that it
    begins no more than two layers ahead is never what a layer waits for, all being equal). The
    first all-gather is exposed.

    updated: seconds after the start of forward at which the last layer's parameters are updated;
        layers are updated evenly in their order, and each is copied up when it is.
    """
    one = whole.of_a_layer(layers)
    link = ring = done = 0.0
    for layer in range(1, layers + 1):
        link = max(link, updated * layer / layers) + one.up
        ring = max(ring, link) + one.gather
        done = max(done, ring) + one.compute
    return done


def backward_s(whole: Pass, layers: int) -> float:
    """Seconds of backward, until the last gradient is reduced and where it belongs.

    The next layer's copy and all-gather are issued when a layer begins (FSDP2's explicit backward
    prefetch), the layer's reduce-scatter when it has ended; collectives run in this order on one
    communicator. Exposed are the first all-gather, the last reduction, and whatever takes longer
    than the compute beside it.
    """
    one = whole.of_a_layer(layers)
    link = one.up
    ring = gathered = link + one.gather
    down = done = 0.0
    for layer in range(1, layers + 1):
        begun = max(done, gathered)
        if layer < layers:
            link = max(link, begun) + one.up
            ring = gathered = max(ring, link) + one.gather
        done = begun + one.compute
        ring = max(ring, done) + one.reduce
        down = max(down, ring) + one.down
    return down
