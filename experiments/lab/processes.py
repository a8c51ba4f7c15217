"""Processes of this machine that work together for a while, started and watched by torch's elastic agent."""

import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hexiopt.own_packages import own_package

T = TypeVar("T")

_MONITOR_S = 0.05
_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing.spawn")  # they print tracebacks of what is raised here


class ProcessFailedError(Exception):
    """A process has failed; the message says which and why, in one line."""


def run_processes(
    count: int, device: str, work: Callable[..., T], *arguments: Any, tell: Callable[[str], None] = lambda line: None
) -> list[T]:
    """What `work(say, *arguments)` returns in each of `count` processes [rank], which find their places as under
    torchrun; `tell` is called with every line that any of them says by `say`.

    They inherit nothing of this one, so that `work` and its arguments are pickled: a process forked after its parent
    has touched CUDA, or has computed with several threads, cannot. Those for a GPU (`device` "cuda") are spawned, those
    for a CPU forked from a process that has only imported torch. Raises ProcessFailedError, after the others have been
    ended.
    """
    context = multiprocessing.get_context("spawn") if device == "cuda" else forking_context()
    lines = context.SimpleQueue()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="lab",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=_MONITOR_S,
        start_method=context.get_start_method(),
    )
    listener = threading.Thread(target=_listen, args=(lines, tell), daemon=True)
    with _quiet_elastic():
        listener.start()
        try:
            results = elastic_launch(config, _run)(lines, work, arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise ProcessFailedError(f"rank {rank}: {_reason(failure)}") from None
        except SignalException:
            raise KeyboardInterrupt from None
        finally:
            lines.put(None)
            listener.join()
    return [results[rank] for rank in range(count)]


def forking_context() -> multiprocessing.context.ForkServerContext:
    """Its processes are forked from one that has only imported torch, which takes a tenth of a second."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", f"{own_package('runtime')}.training.trainee"])
    return context


def _run(lines: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    return work(lines.put, *arguments)


def _listen(lines: Any, tell: Callable[[str], None]) -> None:
    for line in iter(lines.get, None):
        tell(line)


def _reason(failure: ProcessFailure) -> str:
    """The exception of a process, or how it ended, in a line."""
    if failure.exitcode == -signal.SIGALRM:
        return "no answer in time"
    message = failure.error_file_data.get("message")
    if failure.exitcode < 0 or not isinstance(message, dict):
        return f"the process ended with exit code {failure.exitcode}"
    return str(message["message"]).strip().splitlines()[-1]


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Keep torch's loggers silent, and give back the handlers of signals that its agent replaces."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if in_main:
            for number, handler in handlers.items():
                signal.signal(number, handler)
