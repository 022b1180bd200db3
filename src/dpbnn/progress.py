"""What a run shows while it trains, and how it is interrupted between two steps."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from dpbnn.notebook import in_notebook, live
from dpbnn.privacy.checks import round_up
from dpbnn.privacy.plan import Plan

__all__ = ["deferred_interrupt", "progress_bar", "shows_progress", "unbroken"]

_PAUSE = 0.2  # seconds between two states of a bar in a notebook


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
def unbroken() -> Iterator[None]:
    """Hold an interruption back until the end of the block."""
    with deferred_interrupt() as interrupted:
        yield
        stop = interrupted()
    if stop:
        raise stop


def shows_progress() -> bool:
    """Return whether a run shows its progress where nobody has said so."""
    return sys.stderr.isatty() or in_notebook()


@contextlib.contextmanager
def progress_bar(plan: Plan, start: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """Show steps, an upper bound on the epsilon spent so far, and the time left.

    On a terminal and in a notebook that is a bar, elsewhere a line four times in a run.
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

    if in_notebook():
        yield _notebook_bar(plan.steps, start, spent)
        return
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


def _notebook_bar(steps: int, start: int, spent: Callable[[int], str]) -> Callable[[int], None]:
    """Return what shows a step: HTML that is replaced in place, and needs no widgets."""
    began = last = time.monotonic()

    def page(step: int) -> str:
        text = f"step {step}/{steps}, {spent(max(1, step))}"
        if start < step < steps:
            left = (time.monotonic() - began) / (step - start) * (steps - step)
            text += f", about {left:.0f} s left"
        return f'training <progress value="{step}" max="{steps}"></progress> {text}'

    show = live(page(start))

    def advance(step: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PAUSE or step == steps:
            last = now
            show(page(step))

    return advance
