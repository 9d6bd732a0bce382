"""RPC between ranks: a rank's failure detector answers questions even while its other threads wait or run for long."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from ..core.weak_values import WeakValues
from .stacks import stacks

__all__ = ["Question", "Rpc"]

_LONGEST = 16_000  # characters of a stack


class Question:
    """A question of this rank's to some others. Answers are accepted as long as it exists, however late they come."""

    def __init__(self, ranks: Iterable[int], ask: Callable[[int], bool]):
        """`ask` sends it to a rank, and returns False if that is impossible."""
        self.answers: dict[int, dict[str, Any]] = {}
        """The last answer of each rank that `take` has taken."""
        self.arrived: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        """(rank, answer), with None for a rank that will not answer."""
        self._ranks, self._ask = set(ranks), ask
        self._expected: set[int] = set()

    def send(self) -> None:
        """Ask all of the ranks, even those asked before."""
        self._expected = set(self._ranks)
        for rank in sorted(self._expected):
            if not self._ask(rank):
                self.arrived.put((rank, None))

    def take(self, timeout: float = 0.0) -> dict[int, dict[str, Any]]:
        """Wait until all ranks have answered, `timeout` seconds at most. Returns the answers until now."""
        end = time.monotonic() + timeout
        with suppress(queue.Empty):
            while self._expected or not self.arrived.empty():
                rank, answer = self.arrived.get(timeout=max(end - time.monotonic(), 0))
                self._expected.discard(rank)
                if answer is not None:
                    self.answers[rank] = answer
        return self.answers


class Rpc:
    """This rank's questions and its answers."""

    def __init__(self, rank: int, pass_on: Callable[[int, dict[str, Any]], bool]):
        """`pass_on` sends a message to a rank, and returns False if that is impossible."""
        self.rank, self._pass_on = rank, pass_on
        self.handlers: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
            "where": lambda question: {"text": stacks()[-_LONGEST:]}
        }
        """Functions that answer questions, by their "kind". An answer has 128 KiB at most, and None stands for none."""
        self._ended: set[int] = set()
        self._numbers = itertools.count()
        self._asked: WeakValues[int, Question] = WeakValues()  # by number

    def open(self, ranks: Iterable[int], question: dict[str, Any]) -> Question:
        """A question to ranks, yet to be sent."""
        message = {"kind": "ask", "by": self.rank, "number": (number := next(self._numbers)), "question": question}
        ask = lambda rank: rank not in self._ended and self._pass_on(rank, {**message, "of": rank})
        made = self._asked[number] = Question(ranks, ask)
        return made

    def ask(self, ranks: Iterable[int], question: dict[str, Any], timeout: float) -> dict[int, dict[str, Any]]:
        """The answers of those of the ranks that answer within `timeout` seconds."""
        asked = self.open(ranks, question)
        asked.send()
        return asked.take(timeout)

    def hear(self, message: dict[str, Any]) -> None:
        """Answer a question, take an answer, or pass either on to its rank."""
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
            asked.arrived.put((int(message["of"]), message["answer"]))

    def end(self, rank: int) -> None:
        """Expect no answers of a rank: it has ended."""
        self._ended.add(rank)
        for asked in self._asked.values():
            asked.arrived.put((rank, None))
