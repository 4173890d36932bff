"""Strategies of hypothesis for tests of the batch order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from unisono.plan.batch_order import BatchOrder

quick = settings(max_examples=60)
PRIMES = (1, 2, 3, 5, 7, 11, 13, 31, 61, 97, 127, 251, 509)
BIG = 1 << 64

virtual_ranks = st.integers(1, 128)
sizes = st.integers(1, 1024) | st.integers(1, 16)
lengths = st.integers(1, 600) | st.sampled_from(PRIMES)
batches = st.integers(1, 300) | st.sampled_from(PRIMES)
orders = st.builds(
    BatchOrder,
    length=lengths,
    batch=batches,
    virtual_ranks=virtual_ranks,
    micro_batch=st.none() | st.integers(1, 40),
    seed=st.integers(0, BIG - 1),
    shuffle=st.booleans(),
)
