"""What a run shows while it trains, and how it is interrupted between two steps."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from dpbnn.privacy.checks import round_up
from dpbnn.privacy.plan import Plan

__all__ = ["deferred_interrupt", "progress_bar"]


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], BaseException | None]]:
    """Hold the first Ctrl-C, or request to end, back until a step is complete.

    A second one acts at once.
    """
    seen: list[BaseException] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def note(number: int, frame: object) -> None:
        wish = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        if seen:
            raise wish
        seen.append(wish)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: seen[0] if seen else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def progress_bar(plan: Plan, start: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """Show steps, an upper bound on the epsilon spent so far, and the time left.

    On a terminal that is a bar, elsewhere a line four times in a run.
    """
    if not wanted:
        yield lambda step: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    marks = {math.ceil(plan.steps * i / 4): 0.0 for i in (1, 2, 3)}
    marks[plan.steps] = round_up(plan.epsilon, 3) if plan.private else math.inf
    columns = (
        TextColumn("training"),
        BarColumn(),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[spent]}"),
        TimeRemainingColumn(),
    )

    def spent(step: int) -> str:
        if not plan.private:
            return "not private"
        mark = min(m for m in marks if m >= step)
        if not marks[mark]:
            marks[mark] = round_up(plan.epsilon_after(mark), 3)
        return f"epsilon <= {marks[mark]}"

    console = Console(stderr=True)
    if not console.is_terminal:

        def line(step: int) -> None:
            if step in marks:
                print(f"training: step {step}/{plan.steps}, {spent(step)}", file=sys.stderr)

        yield line
        return
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=plan.steps, completed=start, spent=spent(max(1, start)))
        yield lambda step: bar.update(task, completed=step, spent=spent(step))
