"""scripts/browser.sh where there is no browser and none can be installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "browser.sh"


@pytest.mark.skipif(sys.platform == "win32", reason="the script is for a Unix shell")
@pytest.mark.parametrize(("optional", "code"), [("1", 0), ("0", 1)])
def test_a_missing_browser_is_said_loudly_and_fails_only_where_it_is_needed(
    tmp_path, optional, code
):
    for name in ("bash", "dirname", "id"):  # and neither apt-get nor a browser
        (tmp_path / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        [shutil.which("bash"), str(SCRIPT)],
        env={"PATH": str(tmp_path), "OPTIONAL": optional, "HOME": os.environ.get("HOME", "/")},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert "*** BROWSER TESTS LEFT OUT: no Chromium here" in done.stderr
