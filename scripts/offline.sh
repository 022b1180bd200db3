#!/usr/bin/env bash
# Puts into a folder what `dpbnn reproduce` needs on a machine that has torch, numpy, scipy and scikit-learn,
# but no network: pure packages and small wheels, MNIST, and a stand-in for pyarrow, which images do not need.
# offline.sh FOLDER [PYTHON VERSION, such as 3.12]; then PYTHONPATH=FOLDER/packages:src DPBNN_DATA=FOLDER/data.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?offline.sh FOLDER [PYTHON VERSION]}
version=${2:-3.12}
python=${PYTHON:-.venv/bin/python}
packages=(dp-accounting==0.6.0 "attrs<24" absl-py dm-tree wrapt mpmath safetensors jinja2 markupsafe click rich
  pygments markdown-it-py mdurl tomli-w)
mkdir -p "$folder/packages/pyarrow" "$folder/data/mnist"
cat > "$folder/packages/pyarrow/__init__.py" <<'PYTHON'
from unittest.mock import MagicMock


def __getattr__(name):
    return type(name, (), {}) if name[0].isupper() else MagicMock()
PYTHON
"$python" -m pip install -q --no-deps --only-binary=:all: --python-version "$version" --upgrade \
  --constraint constraints.txt --target "$folder/packages" "${packages[@]}"
rm -rf "$folder"/packages/{docs,examples,benchmarks,bin}
cp "${DPBNN_DATA:?}"/mnist/*.gz "$folder/data/mnist/"
du -sh "$folder"
