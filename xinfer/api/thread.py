"""The thread on which a program's engine steps. Everybody else leaves requests with it and hears what comes of them.

A thread of its own keeps the engine whole: Ctrl-C, a cancelled task or a collected generator end a request between two
steps, never the engine in the middle of one.
"""

__all__ = ["EngineThread", "Event", "Job"]

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from xinfer.engine.engine import Engine
from xinfer.engine.outputs import RequestOutput, StepOutput, TokenOutput
from xinfer.engine.types import SamplingParams
from xinfer.errors import EngineStoppedError

log = logging.getLogger(__name__)

Event = TokenOutput | RequestOutput | Exception


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way to the engine and through it.

    Attributes:
        listener: called on the engine's thread with each token, with each sample's result, or with the error that
            refuses or ends the request; must not block. One that raises ends the request.
        request_id: the engine's, once it has taken the request in.
        left: samples that have not ended.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    listener: Callable[[Event], None]
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""
    request_id: str | None = None
    left: int = 0


class EngineThread(threading.Thread):
    """Makes an engine, steps it while it has work, and tells each request's listener.

    Args:
        make: makes the engine.
        end: gives back what it stands on.

    Attributes:
        ready: done once the engine is made; has the error if that fails.
        ended: done once the thread has nothing more to do.
    """

    def __init__(self, make: Callable[[], Engine], end: Callable[[], None]) -> None:
        super().__init__(name="xinfer-engine", daemon=True)  # a program that forgets to close ends all the same
        self._make, self._end = make, end
        self.ready: Future[None] = Future()
        self.ended: Future[None] = Future()
        for future in (self.ready, self.ended):
            future.set_running_or_notify_cancel()  # whoever waits for it may be cancelled, the future itself not
        self.engine: Engine | None = None
        self._jobs: dict[str, Job] = {}
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.RLock()  # a finalizer may come in the middle of anything, and abort or close
        self._open, self._alive = True, True
        self._error: BaseException | None = None
        self.start()

    # ---- for other threads

    def submit(self, jobs: Sequence[Job]) -> None:
        """Leave requests, which start in the same step; if one is refused, none of them runs."""
        with self._lock:
            if not self._open:
                raise self._stopped()
            self._commands.put(partial(self._add, jobs))

    def abort(self, jobs: Sequence[Job], wait: bool = False) -> None:
        """End requests after the step that is running, if they still run; wait until their blocks are free."""
        done = threading.Event()
        with self._lock:
            if self._alive:
                self._commands.put(partial(self._abort, jobs, done))
            else:
                done.set()
        # A collected generator may bring any engine's thread here, which must not wait for itself or in a circle.
        if wait and not isinstance(threading.current_thread(), EngineThread):
            done.wait()

    def close(self, wait: bool = True) -> None:
        """Take no more requests, abort those that run, and end; a second time does nothing."""
        with self._lock:
            if self._open:
                self._open = False
                self._commands.put(self._abort_all)
        if wait and not isinstance(threading.current_thread(), EngineThread):
            self.join()

    # ---- on this one

    def run(self) -> None:
        """Live: until closed, or until the engine fails."""
        try:
            self.engine = self._make()
            del self._make  # it may hold the engine, which is to go when this ends
            self.ready.set_result(None)
            self._serve(self.engine)
        except BaseException as error:  # a backend may raise anything; nothing is known of the engine after that
            log.debug("the engine has stopped", exc_info=True)
            self._error = error
        with self._lock:
            self._open = self._alive = False
        self._obey()  # what came too late
        for job in list(self._jobs.values()):
            self._tell(job, self._stopped())
        self.engine = None
        try:
            self._end()
        except Exception as error:  # see above
            log.warning("the backend could not be closed: %r", error)
        if not self.ready.done():
            self.ready.set_exception(self._error or self._stopped())
        self.ended.set_result(None)

    def _serve(self, engine: Engine) -> None:
        while self._open or self._jobs or not self._commands.empty():
            if not engine.has_work:
                self._commands.get()()
            self._obey()
            if engine.has_work:
                self._deliver(engine.step())

    def _obey(self) -> None:
        with suppress(Empty):
            while True:
                self._commands.get_nowait()()

    def _add(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            try:
                self._admit(job)
            except Exception as error:  # a plugin looks at parameters too
                self._abort(jobs)
                self._tell(job, error)
                return

    def _admit(self, job: Job) -> None:
        if self.engine is None or not self._alive:
            raise self._stopped()
        request = self.engine.add_request(
            job.prompt_token_ids,
            job.params,
            priority=job.priority,
            timeout_s=job.timeout_s,
            cache_salt=job.cache_salt,
        )
        job.request_id, job.left = request.request_id, job.params.n
        self._jobs[request.request_id] = job

    def _abort(self, jobs: Sequence[Job], done: threading.Event | None = None) -> None:
        """End requests of which nobody wants to hear any more."""
        for job in jobs:
            if self.engine is not None and job.request_id in self._jobs:
                del self._jobs[job.request_id]
                self.engine.abort(job.request_id)
        if done is not None:
            done.set()

    def _abort_all(self) -> None:
        """End all requests; what they have come to is told."""
        if self.engine is not None:
            for request_id in self._jobs:
                self.engine.abort(request_id)

    def _deliver(self, step: StepOutput) -> None:
        for token in step.tokens:
            if job := self._jobs.get(token.request.request_id):
                self._tell(job, token)
        for output in step.finished:
            if job := self._jobs.get(output.request_id):
                job.left -= 1
                if not job.left:
                    del self._jobs[output.request_id]
                self._tell(job, output)

    def _tell(self, job: Job, event: Event) -> None:
        try:
            job.listener(event)
        except Exception as error:  # an event loop that is gone, say: nobody listens any more
            log.debug("a request's listener has failed: %r", error)
            self._abort([job])

    def _stopped(self) -> EngineStoppedError:
        """Return why nothing runs here any more."""
        if self._error is None:
            return EngineStoppedError("the engine is closed: make another")
        error = EngineStoppedError(f"the engine can't go on after {type(self._error).__name__}: {self._error}")
        error.__cause__ = self._error
        return error
