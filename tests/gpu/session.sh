#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every GPU test, most telling first, within LIMIT seconds (default 240); a summary comes last. Installs nothing.
#   LIMIT=240 GPU_FILE_LIMIT=90 bash tests/gpu/session.sh [files or pytest options]
# Other Python packages come from PYTHONPATH. Ranks share devices where NCCL_MULTI_RANK_GPU_ENABLE=1 (an NCCL that
# knows it must be preloaded). DS_GPU_TESTS_ON_CPU=1 runs the same code on gloo. Logs go to $OUT where that is set.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
limit=${LIMIT:-240}
folder=${OUT:-$(mktemp -d)}
log=$folder/gpu-tests.log
export GPU_SESSION_RESULTS=$folder/gpu-results.txt GPU_SESSION_NOTES=$folder/gpu-notes.txt
export GPU_SESSION_END=$(($(date +%s) + limit - 8))
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
: >"$GPU_SESSION_RESULTS"
: >"$GPU_SESSION_NOTES"
if [ $# -eq 0 ]; then
  set -- parity hpz streams no_sync checkpoints memory fused_step wire faults
  set -- "${@/#/tests/gpu/test_}"
  set -- "${@/%/.py}"
fi
start=$(date +%s)
timeout -k 5 "$limit" "$python" -m pytest -c tests/gpu/pytest.ini --rootdir . --confcutdir . -p no:cacheprovider \
  -q --tb=short --no-header "$@" >"$log" 2>&1
status=$?
tail -c "${TAIL:-7000}" "$log"
echo
echo "================ GPU tests: summary after $(($(date +%s) - start)) s, pytest status $status ================"
cat "$GPU_SESSION_NOTES"
sed 's/^/  /' "$GPU_SESSION_RESULTS"
count() { grep -c "^$1" "$GPU_SESSION_RESULTS"; }
echo "passed $(count passed), failed $(count failed), skipped $(count skipped)"
[ "$status" -ne 124 ] || echo "ENDED BY THE LIMIT of $limit s: what is not listed was not run"
exit "$status"
