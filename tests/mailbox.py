"""A transport whose ranks all live in one process, so that any number of them can be tested without starting one.

Ranks are threads. It is as strict as a real one may be: nothing moves before both ends have submitted it, and what is
sent is read only then, from where it lies.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hotspa_megatron.runtime.transport import Exchange, Pace

SMALL_PACE = Pace(piece=256, direct=64, buffer=1024, on_stream=False)
"""Sizes that cut even the smallest models to pieces and batches."""
LIMIT_S = 20.0


class Mailboxes:
    """Messages that wait for their other end, by (sender, receiver, tag); shared by the transports of all ranks."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sends: dict[tuple[int, int, int], deque[_Message]] = {}
        self.receives: dict[tuple[int, int, int], deque[_Message]] = {}
        self.delivered = 0
        self.failed = False

    def post(self, key: tuple[int, int, int], message: _Message, *, sending: bool) -> None:
        with self.changed:
            own, other = (self.sends, self.receives) if sending else (self.receives, self.sends)
            waiting = other.get(key)
            if not waiting:
                own.setdefault(key, deque()).append(message)
                return
            partner = waiting.popleft()
            source, target = (message, partner) if sending else (partner, message)
            if source.buffer.shape != target.buffer.shape or source.buffer.dtype != target.buffer.dtype:
                raise RuntimeError(f"a message of {source.buffer.shape} met a buffer of {target.buffer.shape}")
            target.buffer.copy_(source.buffer)
            message.done = partner.done = True
            self.delivered += 1
            self.changed.notify_all()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not any(self.sends.values()) and not any(self.receives.values())


class _Message:
    def __init__(self, buffer: torch.Tensor) -> None:
        assert buffer.is_contiguous()
        self.buffer, self.done = buffer, False


class MailboxTransport:
    def __init__(self, mailboxes: Mailboxes, rank: int, pace: Pace = SMALL_PACE) -> None:
        self.mailboxes, self.rank, self.pace = mailboxes, rank, pace
        self.tag = 0
        self.submitted: list[tuple[tuple[int, int, int], _Message, bool]] = []

    def next_tag(self) -> int:
        self.tag += 1
        return self.tag

    def submit_send(self, buffer: torch.Tensor, receiver: int, tag: int) -> None:
        self.submitted.append(((self.rank, receiver, tag), _Message(buffer), True))

    def submit_receive(self, buffer: torch.Tensor, sender: int, tag: int) -> None:
        self.submitted.append(((sender, self.rank, tag), _Message(buffer), False))

    def run(self) -> Exchange:
        submitted, self.submitted = self.submitted, []
        for key, message, sending in submitted:
            self.mailboxes.post(key, message, sending=sending)
        return _Exchange(self.mailboxes, [message for _, message, _ in submitted])


class _Exchange:
    def __init__(self, mailboxes: Mailboxes, messages: list[_Message]) -> None:
        self.mailboxes, self.messages = mailboxes, messages

    def wait(self) -> None:
        with self.mailboxes.changed:
            arrived = self.mailboxes.changed.wait_for(
                lambda: self.mailboxes.failed or all(message.done for message in self.messages), LIMIT_S
            )
        if self.mailboxes.failed:
            raise RuntimeError("another rank failed")
        assert arrived, "a message never met its other end"


def on_ranks(mailboxes: Mailboxes, count: int, run: Callable[[int], Any]) -> Sequence[Any]:
    """``run(rank)`` on as many threads; their results, or the first failure."""
    results: list[Any] = [None] * count
    failures: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = run(rank)
        except BaseException as error:
            with mailboxes.changed:
                failures.append(error)
                mailboxes.failed = True
                mailboxes.changed.notify_all()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
