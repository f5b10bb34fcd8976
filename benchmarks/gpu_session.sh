#!/usr/bin/env bash
# One measuring session on a machine with GPUs: `bash benchmarks/gpu_session.sh [compare options]`.
#
# Needs python3 with torch. Optional, in .carry/ at the repository root: wheels/*.whl (packages that the machine lacks),
# upstream/ (a folder with upstream's package and what it needs), and, where several ranks must share one GPU,
# ranks_on_one_gpu.sh with libnccl.so.2.xz (an NCCL that allows it).
#   OUT       where results go (default runs/gpu)
#   LIMIT     seconds for the whole session (default 560)
#   WORKS     works or sets (default: gpu2 gpu4)
#   VARIANTS  default: ours,fsdp2,fsdp2-fp32reduce,single, and upstream where it is there
set -u
cd "$(dirname "$0")/.." || exit 1
OUT=${OUT:-runs/gpu}
LIMIT=${LIMIT:-560}
started=$(date +%s)
mkdir -p "$OUT"
site=$(mktemp -d)
for wheel in .carry/wheels/*.whl; do
  [ -e "$wheel" ] && python3 -m zipfile -e "$wheel" "$site"
done
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
echo "GPUs: $gpus"
if [ "$gpus" = 1 ] && [ -e .carry/ranks_on_one_gpu.sh ]; then
  export NCCL_XZ=.carry/libnccl.so.2.xz
  . .carry/ranks_on_one_gpu.sh
fi
upstream=()
default=ours,fsdp2,fsdp2-fp32reduce,single
if [ -d .carry/upstream ]; then
  upstream=(--upstream .carry/upstream)
  default=ours,fsdp2,fsdp2-fp32reduce,upstream,single
fi
if [ -z "${SKIP_KERNEL:-}" ] && [ -e benchmarks/kernel.py ]; then
  timeout 100 python3 -m benchmarks.kernel --out "$OUT" 2>&1 | tail -40
fi
for works in ${WORKS:-gpu2 gpu4}; do
  left=$((LIMIT - $(date +%s) + started - 10))
  [ "$left" -lt 45 ] && { echo "$works: not begun"; continue; }
  channels=()
  case $works in 4r*|gpu4) channels=(NCCL_MAX_NCHANNELS=16 NCCL_MAX_CTAS=16) ;; esac
  timeout -k 5 "$left" env "${channels[@]}" python3 -m benchmarks.compare --device cuda --works "$works" \
    --variants "${VARIANTS:-$default}" "${upstream[@]}" --out "$OUT/$works" --time-limit $((left - 15)) \
    --run-limit 60 --build-limit 90 --start-limit 120 "$@"
  echo "exit $? after $(($(date +%s) - started)) s"
  for name in compare.json compare.txt compare.png; do
    [ -e "$OUT/$works/$name" ] && cp "$OUT/$works/$name" "$OUT/$works-$name"
  done
done
tail -n 60 "$OUT"/*/logs/*.log >"$OUT/logs.txt" 2>/dev/null
rm -rf "$site"
exit 0
