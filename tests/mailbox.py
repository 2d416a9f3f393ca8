"""A transport whose ranks all live in one process, so that any number of them can be tested without starting one.

Every rank begins before the first one finishes: what is sent waits in a mailbox until its receiver waits for it.
"""

from __future__ import annotations

from collections import deque

import torch

from hotspa_megatron.runtime.transport import Exchange

Mailboxes = dict[tuple[int, int], deque[torch.Tensor]]
"""Messages under way, by (sender, receiver); shared by the transports of all ranks."""


class MailboxTransport:
    def __init__(self, mailboxes: Mailboxes, rank: int) -> None:
        self.mailboxes, self.rank = mailboxes, rank
        self.sends: list[tuple[torch.Tensor, int]] = []
        self.receives: list[tuple[torch.Tensor, int]] = []

    def submit_send(self, buffer: torch.Tensor, receiver: int) -> None:
        self.sends.append((buffer, receiver))

    def submit_receive(self, buffer: torch.Tensor, sender: int) -> None:
        self.receives.append((buffer, sender))

    def run(self) -> Exchange:
        for buffer, receiver in self.sends:
            self.mailboxes.setdefault((self.rank, receiver), deque()).append(buffer.clone())
        expected = [
            (buffer, self.mailboxes.setdefault((sender, self.rank), deque())) for buffer, sender in self.receives
        ]
        self.sends, self.receives = [], []
        return _Expected(expected)


class _Expected:
    def __init__(self, expected: list[tuple[torch.Tensor, deque[torch.Tensor]]]) -> None:
        self.expected = expected

    def wait(self) -> None:
        for buffer, box in self.expected:
            message = box.popleft()
            if message.shape != buffer.shape or message.dtype != buffer.dtype:
                raise RuntimeError(f"a message of {message.shape} {message.dtype} met a buffer of {buffer.shape}")
            buffer.copy_(message)
        self.expected = []
