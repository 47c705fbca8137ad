#!/usr/bin/env bash
# Does xinfer hold on a machine with a CUDA device, torch 2.11 or later, and no package index? Under five minutes for a backend.
#
#   experiments/gpu_check.sh pack [3.12]   where there is an index: brings the wheels that such a machine may lack, for
#                                          that version of Python, into .wheels/; ONNX Runtime for CUDA, 244 MiB, in
#                                          parts of 52 MiB, .wheels/onnxruntime-gpu/*.part, which can be carried one
#                                          after the other and are put together there
#   experiments/gpu_check.sh [OUT] [compile [PARTS]|eager|attention|onnx]
#                                          on that machine: checks parity and measures, and writes OUT/gpu_check.json,
#                                          OUT/gpu_check_compile.json (see gpu_check_compile.py for its parts),
#                                          OUT/gpu_check_attention.json (each kernel by itself) and
#                                          OUT/gpu_check_onnx.json (OUT is the current folder by default); exit code 1
#                                          if a check failed. Five minutes each, compile more, all by default; onnx only
#                                          where a wheel of ONNX Runtime is there or one is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = pack ]; then
  platforms=()
  for name in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${name}_x86_64")
  done
  python3 -m pip download --quiet --no-deps --only-binary :all: --python-version "${2:-3.12}" --implementation cp \
    "${platforms[@]}" -d .wheels safetensors tokenizers pluggy gguf psutil huggingface-hub jinja2 markupsafe \
    onnxruntime-gpu onnx onnx-ir ml-dtypes flatbuffers protobuf
  rm -rf .wheels/onnxruntime-gpu && mkdir .wheels/onnxruntime-gpu
  for wheel in .wheels/onnxruntime_gpu-*.whl; do
    split -b 52M "$wheel" ".wheels/onnxruntime-gpu/$(basename "$wheel")." --additional-suffix=.part
    (cd .wheels && sha256sum "$(basename "$wheel")" >onnxruntime-gpu/whole.sha256) && rm "$wheel"
  done
  ls .wheels .wheels/onnxruntime-gpu
  exit
fi

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if compgen -G ".wheels/*.whl" >/dev/null; then
  python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" .wheels/*.whl
fi
if compgen -G ".wheels/onnxruntime-gpu/*.part" >/dev/null; then
  first=$(basename "$(ls .wheels/onnxruntime-gpu/*.part | head -1)")
  cat .wheels/onnxruntime-gpu/*.part >"$site/${first%.*.part}"
  (cd "$site" && sha256sum --quiet --check "$OLDPWD/.wheels/onnxruntime-gpu/whole.sha256")
  python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$site"/onnxruntime_gpu-*.whl
  rm "$site"/onnxruntime_gpu-*.whl
fi
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
out=${1:-.} which=${2:-all} failed=0
if [ "$which" = compile ] || [ "$which" = all ]; then
  python3 experiments/gpu_check_compile.py --json "$out/gpu_check_compile.json" ${3:+--parts "$3"} || failed=1
fi
if [ "$which" = attention ] || [ "$which" = all ]; then
  python3 experiments/gpu_check_attention.py --json "$out/gpu_check_attention.json" || failed=1
fi
if [ "$which" = eager ] || [ "$which" = all ]; then
  python3 experiments/gpu_check.py --json "$out/gpu_check.json" || failed=1
fi
if [ "$which" = onnx ] || { [ "$which" = all ] && python3 -c "import onnxruntime, onnx_ir" 2>/dev/null; }; then
  python3 experiments/gpu_check_onnx.py --json "$out/gpu_check_onnx.json" || failed=1
fi
exit $failed
