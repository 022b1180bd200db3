#!/usr/bin/env bash
# Opens the report's pages in headless Chromium; installs it first where that is allowed.
set -euo pipefail
cd "$(dirname "$0")/.."
found() { command -v chromium || command -v chromium-browser || command -v google-chrome; }
if ! found >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -q && apt-get install -q -y --no-install-recommends chromium || true
  fi
fi
found || { echo "No Chromium here and none could be installed: install the package 'chromium'." >&2; exit 1; }
OMP_NUM_THREADS=1 "${PYTHON:-.venv/bin/python}" -m pytest -q tests/report/test_report_browser.py "$@"
