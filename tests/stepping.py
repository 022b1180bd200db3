"""One step of a process, for tests that have no run."""


def step(process, state, gate, x, y):
    """Draw, contribute, release, update: return the next state."""
    state = process.draw(state)
    return process.update(state, gate(process.contribute(state, x, y)))
