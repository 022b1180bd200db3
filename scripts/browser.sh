#!/usr/bin/env bash
# Opens the report's pages in headless Chromium; installs it first where that is allowed.
# LIMIT is the time for all of it, in seconds. With OPTIONAL=1, as in .ci/run, it is no failure
# that there is no browser or not enough time; that is said loudly. A failing test is one always.
set -euo pipefail
cd "$(dirname "$0")/.."
limit=${LIMIT:-600}
found() { command -v chromium || command -v chromium-browser || command -v google-chrome; }
within() { timeout -k 5 $((limit > SECONDS ? limit - SECONDS : 1)) "$@"; }
left_out() {
  printf '\n*** BROWSER TESTS LEFT OUT: %s ***\n\n' "$1" >&2
  [ "${OPTIONAL:-0}" = 1 ] && exit 0 || exit 1
}
install() {
  export DEBIAN_FRONTEND=noninteractive
  within apt-get update -q && within apt-get install -q -y --no-install-recommends chromium
}
if ! found >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "Installing Chromium"
  install >/dev/null 2>&1 || true
fi
found || left_out "no Chromium here, and none could be installed; install the package 'chromium'"
code=0
OMP_NUM_THREADS=1 within "${PYTHON:-.venv/bin/python}" -m pytest -q \
  tests/report/test_report_browser.py "$@" || code=$?
[ $code != 124 ] && [ $code != 137 ] || left_out "they took more than $limit seconds"
exit $code
