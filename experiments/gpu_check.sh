#!/usr/bin/env bash
# Does xinfer hold on a machine with a CUDA device, torch 2.11 or later, and no package index? Under five minutes.
#
#   experiments/gpu_check.sh pack [3.12]   where there is an index: brings the wheels that such a machine may lack, for
#                                          that version of Python, into .wheels/
#   experiments/gpu_check.sh [OUT]         on that machine: checks parity and measures, and writes OUT/gpu_check.json
#                                          (OUT is the current folder by default); exit code 1 if a check failed
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = pack ]; then
  platforms=()
  for name in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${name}_x86_64")
  done
  python3 -m pip download --quiet --no-deps --only-binary :all: --python-version "${2:-3.12}" --implementation cp \
    "${platforms[@]}" -d .wheels safetensors tokenizers pluggy gguf psutil huggingface-hub jinja2 markupsafe
  ls .wheels
  exit
fi

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if compgen -G ".wheels/*.whl" >/dev/null; then
  python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" .wheels/*.whl
fi
PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" python3 experiments/gpu_check.py --json "${1:-.}/gpu_check.json"
