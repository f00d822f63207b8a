"""Requests to a store that end, whatever becomes of the store.

A store whose process is stopped answers neither yes nor no, and torch's requests have no limit. A thread of our own therefore
makes them, and the asking thread waits for it only so long.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any

SLICE = 0.5
"""Seconds of one wait for an answer. A pause of this process counts as one wait, however long it is."""

Request = tuple[Callable[[], Any], "concurrent.futures.Future[Any]"]


class Line:
    """A thread that makes requests one after the other."""

    def __init__(self) -> None:
        """Starts the thread, which ends with the process."""
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._unanswered: concurrent.futures.Future[Any] | None = None
        threading.Thread(target=self._serve, name="autoremat-store", daemon=True).start()

    def ask(self, request: Callable[[], Any], seconds: float) -> Any:
        """Returns the result of ``request``, or raises its error.

        Raises ``TimeoutError`` if that takes more than ``seconds``, and at once while an earlier request has no answer.
        """
        if self._unanswered is not None and not self._unanswered.done():
            raise TimeoutError("an earlier request has had no answer")
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._requests.put((request, answer))
        for _ in range(max(1, round(seconds / SLICE))):
            if concurrent.futures.wait([answer], min(SLICE, seconds)).done:
                return answer.result()
        self._unanswered = answer
        raise TimeoutError(f"no answer for {seconds:g} s")

    def _serve(self) -> None:
        while True:
            request, answer = self._requests.get()
            try:
                answer.set_result(request())
            except BaseException as error:  # the asking thread raises it
                answer.set_exception(error)
