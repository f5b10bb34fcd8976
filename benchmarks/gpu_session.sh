#!/usr/bin/env bash
# One measuring session on a machine with GPUs: `bash benchmarks/gpu_session.sh [compare options]`.
#
# Needs python3 with torch. Optional, in .carry/ at the repository root: wheels/*.whl (packages that the machine lacks),
# upstream/ (a folder with upstream's package and what it needs), and, where several ranks must share one GPU,
# ranks_on_one_gpu.sh with libnccl.so.2.xz (an NCCL that allows it).
#   OUT       folder for the results (default runs/gpu): kernel.json, logs.txt, and per set of works its json, txt, png
#   LIMIT     seconds for the whole session (default 570)
#   WORKS     works or sets, each a run of benchmarks.compare (default: gpu2 gpu4)
#   CTAS      multiprocessors that a collective of two ranks on one GPU may take (default 8), for every variant
#   VARIANTS  default: ours,fsdp2,upstream, and fsdp2-fp32reduce and single with two ranks
set -u
cd "$(dirname "$0")/.." || exit 1
OUT=$(mkdir -p "${OUT:-runs/gpu}" && cd "${OUT:-runs/gpu}" && pwd)
LIMIT=${LIMIT:-570}
started=$(date +%s)
scratch=$(mktemp -d)
for wheel in .carry/wheels/*.whl; do
  [ -e "$wheel" ] && python3 -m zipfile -e "$wheel" "$scratch/site"
done
export PYTHONPATH="$scratch/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
echo "GPUs: $gpus"
if [ -z "${SKIP_KERNEL:-}" ]; then
  timeout -k 5 90 python3 -m benchmarks.kernel --out "$OUT" 2>&1 | tail -n 30
fi
if [ "$gpus" = 1 ] && [ -e .carry/ranks_on_one_gpu.sh ]; then
  export NCCL_XZ=.carry/libnccl.so.2.xz
  . .carry/ranks_on_one_gpu.sh
fi
upstream=()
[ -d .carry/upstream ] && upstream=(--upstream .carry/upstream)
for works in ${WORKS:-gpu2 gpu4}; do
  left=$((LIMIT - $(date +%s) + started - 10))
  [ "$left" -lt 45 ] && { echo "$works: not begun"; continue; }
  variants=ours,fsdp2
  [ -d .carry/upstream ] && variants=$variants,upstream
  channels=(NCCL_DEBUG=WARN)
  case $works in
    4r* | gpu4) [ "$gpus" -lt 4 ] && channels+=(NCCL_MAX_NCHANNELS=16 NCCL_MAX_CTAS=16) ;;
    # a collective that waits for the other rank must not hold the multiprocessors that this rank computes on
    *) variants=$variants,fsdp2-fp32reduce,single; [ "$gpus" -lt 2 ] && channels+=(NCCL_MAX_CTAS=${CTAS:-8}) ;;
  esac
  timeout -k 5 "$left" env "${channels[@]}" python3 -m benchmarks.compare --device cuda --works "$works" \
    --variants "${VARIANTS:-$variants}" ${upstream[@]+"${upstream[@]}"} --out "$scratch/$works" \
    --time-limit $((left - 15)) --steps 4 --warmup 3 --run-limit 60 --build-limit 90 --start-limit 120 "$@"
  echo "$works: exit $? after $(($(date +%s) - started)) s"
  for name in compare.json compare.txt compare.png; do
    [ -e "$scratch/$works/$name" ] && cp "$scratch/$works/$name" "$OUT/$works-$name"
  done
  tail -n 40 "$scratch"/*/logs/*-0.log >"$OUT/logs.txt" 2>/dev/null
done
rm -rf "$scratch"
exit 0
