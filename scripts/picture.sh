#!/usr/bin/env bash
# Takes docs/report.png, the README's picture, from the page that `make demo` wrote.
set -euo pipefail
cd "$(dirname "$0")/.."
page=$(realpath "${1:-demo/report.html}")
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/frame.html" <<HTML
<!doctype html><meta charset="utf-8">
<style>
  body { margin: 0; display: flex; gap: 12px; background: #8a939c; }
  iframe { border: 0; width: 800px; height: 1000px; }
</style>
<iframe src="file://$page"></iframe>
<iframe src="file://$page#reliability" style="color-scheme: dark"></iframe>
HTML
sandbox=(); [ "$(id -u)" != 0 ] || sandbox=(--no-sandbox)
"$browser" --headless=new "${sandbox[@]}" --disable-gpu --hide-scrollbars --virtual-time-budget=3000 \
  --user-data-dir="$work/profile" --window-size=1612,1000 --screenshot="$PWD/docs/report.png" \
  "file://$work/frame.html" 2>/dev/null
ls -l docs/report.png
