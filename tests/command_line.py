"""The command line, run in this process."""

import pytest

from dpbnn.cli import main


def run(capsys, *arguments):
    """Return exit code, output and errors of `dpbnn arguments...`."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    streams = capsys.readouterr()
    return stop.value.code or 0, streams.out, streams.err
