"""The traffic between sites when they synchronize. Two sites send each number once in each direction.

Two sites of two processes; a row of numbers is as long as the model, and each process sends one chunk of it to its
counterparts, which have the same rank in the other sites:

    site 0      process 0   [ a0 |    ] ---a0--->  (a0 + b0) / 2 = m0  ---m0 within the site--->  [ m0 | m1 ]
                process 1   [    | a1 ] ---a1--->  (a1 + b1) / 2 = m1  ---m1----------------->    [ m0 | m1 ]
    site 1      process 0   [ b0 |    ] ---b0--->  (a0 + b0) / 2 = m0  ...
                process 1   [    | b1 ] ---b1--->  (a1 + b1) / 2 = m1  ...

All sites add the received values in the order of sites (block_quantizer.py), so all have the same bits. Chunks are
whole blocks of the row, so the number of processes of a site changes no bit. With more than two sites each sends its
row to every other one.

A few numbers are sent with the rows, and every joint operation of all sites begins with them. They show when a site
makes another call, and keep the messages between two processes in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.distributed.process_group import Message, ProcessGroup, Work, wait_for
from unisono.exchange.compression.block_quantizer import BLOCK, decode_row, encode_row, row_bytes


class PendingExchange:
    """Numbers and rows in transit from every site to every other. A process waits for them only when it reads them."""

    def __init__(
        self,
        site: ProcessGroup,
        across: ProcessGroup,
        words: torch.Tensor,
        codes: list[torch.Tensor],
        lengths: list[int],
        bits: int,
    ) -> None:
        self.site, self.across, self.lengths, self.bits = site, across, lengths, bits
        others = [other for other in range(across.size) if other != across.rank]
        self.words = [words if s == across.rank else torch.empty_like(words) for s in range(across.size)]
        self.codes = [codes if s == across.rank else [torch.empty_like(c) for c in codes] for s in range(across.size)]
        self._spoken = across.send_and_receive(
            [Message(words, other) for other in others], [Message(self.words[other], other) for other in others]
        )
        self._written: list[Work] = []
        for row in range(len(codes)):
            self._written += across.send_and_receive(
                [Message(codes[row], other) for other in others],
                [Message(self.codes[other][row], other) for other in others],
            )

    def heard(self) -> list[list[float]]:
        """Return the numbers of every site."""
        wait_for(self._spoken)
        self._spoken = []
        return [words.tolist() for words in self.words]

    def means(self, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Return the mean of every row over the sites. All processes of a site call this together."""
        wait_for(self._written)
        self._written = []  # pending work of gloo holds its connections: a forked loader worker would close them
        found = []
        for row, (length, dtype) in enumerate(zip(self.lengths, dtypes, strict=True)):
            first, *rest = [decode_row(codes[row], self.bits, dtype) for codes in self.codes]
            total = first.clone()
            for other in rest:
                total += other
            total /= self.across.size
            found.append(together(total, self.site)[:length])
        return found


class SiteTransport:
    """The connection between the sites, for this process.

    site    the processes of this site
    across  its counterparts, in the order of sites
    sent    bytes that all processes of this site have sent
    """

    def __init__(self, site: ProcessGroup, across: ProcessGroup) -> None:
        self.site, self.across, self.sent = site, across, 0

    def tell(self, words: Sequence[float]) -> list[list[float]]:
        """Exchange numbers, and return those of every site. All sites send the same number of them."""
        return self.send(words, [], 32).heard()

    def send(
        self,
        words: Sequence[float],
        rows: Sequence[torch.Tensor],
        bits: int,
        left: Sequence[torch.Tensor] = (),
    ) -> PendingExchange:
        """Send numbers and rows to all other sites.

        Args:
            words: a few numbers.
            rows: tensors [any length].
            bits: number of bits with which each number of a row is sent.
            left: this process's chunk of the residual of every row (`chunk_of`), which is added to the row, and
                replaced by the new residual; empty: residuals are dropped.
        """
        codes = []
        for i, row in enumerate(rows):
            chunk = chunk_of(row, self.site)
            if left:
                chunk = chunk.add_(left[i])
            codes.append(encode_row(chunk, bits))
            if left:
                left[i].copy_(chunk - decode_row(codes[-1], bits, chunk.dtype))
            self.sent += (self.across.size - 1) * self.site.size * row_bytes(len(chunk), bits, chunk.dtype)
        header = torch.tensor(words, dtype=torch.float64, device=self.site.device)
        self.sent += (self.across.size - 1) * self.site.size * header.nbytes
        return PendingExchange(self.site, self.across, header, codes, [len(row) for row in rows], bits)


def chunk_of(row: torch.Tensor, site: ProcessGroup) -> torch.Tensor:
    """Return a copy of the chunk of a row that this process of a site sends: whole blocks, padded with zeros."""
    blocks = -(-len(row) // BLOCK)
    length = max(1, -(-blocks // site.size)) * BLOCK
    chunk = row.new_zeros(length)
    mine = row[site.rank * length : (site.rank + 1) * length]
    chunk[: len(mine)] = mine
    return chunk


def together(chunk: torch.Tensor, site: ProcessGroup) -> torch.Tensor:
    """Gather the chunks of all processes of a site to a row, padded with zeros."""
    if site.size == 1:
        return chunk
    row = chunk.new_empty(site.size * len(chunk))
    site.all_gather(row, chunk).wait()
    return row
