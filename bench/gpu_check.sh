#!/usr/bin/env bash
# Everything about kvrelay on a GPU, in parts: bench/gpu_check.sh --help, and docs/gpu.md.
cd "$(dirname "$0")/.." || exit
[ -n "${PYTHON:-}" ] || { [ -x .venv/bin/python ] && PYTHON=.venv/bin/python || PYTHON=python3; }
exec "$PYTHON" -m bench.gpu.check "$@"
