"""RPC between ranks: questions, which a rank's watch thread answers, also when its other threads wait, or run for long."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from .stacks import stacks

__all__ = ["Rpc"]

_LONGEST = 16_000  # characters of a stack


class Rpc:
    """This rank's questions and its answers."""

    def __init__(self, rank: int, pass_on: Callable[[int, dict[str, Any]], bool]):
        """`pass_on` sends a message to a rank; False when that cannot be."""
        self.rank, self._pass_on = rank, pass_on
        self.handlers: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
            "where": lambda question: {"text": stacks()[-_LONGEST:]}
        }
        """Functions that answer questions, by their "kind". An answer has 128 KiB at most, and None stands for none."""
        self._ended: set[int] = set()
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[set[int], queue.SimpleQueue]] = {}  # ranks that have yet to answer, by number

    def ask(self, ranks: Iterable[int], question: dict[str, Any], timeout: float) -> dict[int, dict[str, Any]]:
        """The answers of those of the ranks that answer within `timeout` seconds."""
        number, end, answers = next(self._numbers), time.monotonic() + timeout, {}
        open_, arrived = set(ranks) - self._ended, queue.SimpleQueue()
        self._asked[number] = open_, arrived
        try:
            for rank in sorted(open_):
                message = {"kind": "ask", "of": rank, "by": self.rank, "number": number, "question": question}
                if not self._pass_on(rank, message):
                    arrived.put((rank, None))
            with suppress(queue.Empty):
                while open_ - set(answers):
                    rank, answer = arrived.get(timeout=max(end - time.monotonic(), 0))
                    open_.discard(rank)
                    if answer is not None:
                        answers[rank] = answer
        finally:
            del self._asked[number]
        return answers

    def hear(self, message: dict[str, Any]) -> None:
        """Answer a question, take an answer, or pass either on to the rank for which it is."""
        asks = message["kind"] == "ask"
        whose = int(message["of"] if asks else message["by"])
        if whose != self.rank:
            self._pass_on(whose, message)
        elif asks:
            question = message["question"]
            handler, answer = self.handlers.get(str(question.get("kind"))), None
            with suppress(Exception):  # of whatever state this rank is in: it must go on watching
                answer = handler(question) if handler else None
            self._pass_on(int(message["by"]), {**message, "kind": "answer", "question": None, "answer": answer})
        elif (asked := self._asked.get(message["number"])) is not None:
            asked[1].put((int(message["of"]), message["answer"]))

    def end(self, rank: int) -> None:
        """Expect no answers of a rank: it has ended."""
        self._ended.add(rank)
        for open_, arrived in list(self._asked.values()):
            if rank in open_:
                arrived.put((rank, None))
