#!/usr/bin/env bash
# Make .venv with everything in it: the package (editable), the engine and the developers' tools.
#
# PyTorch comes in builds of very different size. On Linux the common package index gives the CUDA
# build (gigabytes); this script never takes that by accident:
#   TORCH_INDEX=URL   take torch from this index (PyTorch's documentation lists the one for CPU)
#   TORCH=cuda        accept the CUDA build
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "setup: tokenpath needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2
    exit 2
fi

if [ ! -x .venv/bin/python ]; then
    echo "setup: creating .venv with $("$PYTHON" --version)"
    "$PYTHON" -m venv .venv || {
        echo "setup: cannot create a virtual environment; on Debian: apt-get install python3-venv" >&2
        exit 2
    }
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

# Older pips, such as the one that comes with Python, fetch a whole wheel to learn its hash, which
# `tokenpath models pull` asks of them.
pip install --quiet --upgrade "$(grep '^pip==' constraints.txt)"

torch=$(grep '^torch==' constraints.txt)
if ! .venv/bin/python -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '${torch#torch==}')" 2>/dev/null; then
    if [ -z "${TORCH_INDEX:-}" ] && [ "${TORCH:-}" != cuda ]; then
        wants_cuda=$(pip install --dry-run --quiet --report - -c constraints.txt "$torch" 2>/dev/null |
            .venv/bin/python -c 'import json, sys; print(sum(i["metadata"]["name"].startswith(("nvidia", "cuda")) for i in json.load(sys.stdin)["install"]))')
        if [ "${wants_cuda:-0}" != 0 ]; then
            echo "setup: your package index offers the CUDA build of torch, several gigabytes." >&2
            echo "setup: say TORCH_INDEX=URL for the CPU build, or TORCH=cuda to take it." >&2
            exit 2
        fi
    fi
    echo "setup: installing $torch"
    pip install --quiet -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
fi
echo "setup: installing tokenpath and its tools"
pip install --quiet -c constraints.txt -e '.[engine,dev]'
touch .venv/.complete
echo "setup: done"
