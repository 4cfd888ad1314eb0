#!/usr/bin/env bash
# Runs tests and benchmarks on a machine with a GPU, whose Python has torch, triton and transformers:
#
#   tests/gpu_run.sh right           are the kernels and the backend correct? facts, compile, tests, kernels
#   tests/gpu_run.sh fast            how fast are steps and the service, and what takes the time? steps, service
#   tests/gpu_run.sh whole           does the service work, also when its worker is killed, and does any kernel touch
#                                    memory that is not its own? small_service, system, memcheck, racecheck
#   tests/gpu_run.sh why             what bounds the kernels, and are others faster? counters, peers, variants
#   tests/gpu_run.sh compile steps   only these steps
#
# `make gpu-wheels`, run elsewhere, downloads the other packages to .whl; they are installed in a folder of their own.
# Every step has a limit. After each step, $OUT (build/gpu) has its log, its figures as JSON, and a line in summary.txt.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

OUT=${OUT:-build/gpu}
PYTHON=${PYTHON:-python3}
site=${SITE:-/tmp/penstock-site}
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export PYTHONPATH="$site:$PWD/.dev:$PWD/tests/support:$PWD/tests/peers"

# step NAME SECONDS COMMAND...
step() {
  local name=$1 limit=$2 began=$SECONDS status
  shift 2
  echo "== $name" >>"$OUT/run.log"
  timeout --signal=INT --kill-after=10 "$limit" "$@" >>"$OUT/run.log" 2>&1
  status=$?
  echo "$name: status $status after $((SECONDS - began)) of $limit s" | tee -a "$OUT/summary.txt"
}

# bench NAME SECONDS PART...
bench() {
  local name=$1 limit=$2
  shift 2
  step "$name" "$((limit + 10))" "$PYTHON" -P -m gpu_bench --seconds "$limit" --json "$OUT/$name.json" --parts "$@"
}

# pytest NAME SECONDS ARGUMENT... The machine's own plugins may not suit this pytest.
pytest() {
  local name=$1 limit=$2
  shift 2
  PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTEST_PLUGINS=xdist.plugin,pytest_asyncio.plugin,pytest_timeout \
    step "$name" "$limit" ${UNDER:-} "$PYTHON" -P -m pytest -p gpu_bench.print_failures -q --timeout 120 -rfE "$@"
}

# Tests that only compile.
COMPILED="--ignore-glob=*_ahead.py --ignore-glob=*_aot.py --ignore-glob=*_compiled.py"
SMALL_TESTS="(acceptance or routing or window or prepare or logprobs or norm or gate) and not size and not refused"
# sanitize TOOL SECONDS: a tenth of the kernels' tests, which take a hundred times as long then.
sanitize() {
  # So that torch's allocator does not hide where a tensor ends.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 UNDER="compute-sanitizer --tool $1 --target-processes all --error-exitcode 9" \
    pytest "$1" "$2" tests/kernels/cuda $COMPILED --ignore-glob=*test_attention.py --maxfail 5 \
    -k "${SANITIZED:-$SMALL_TESTS}"
}

prepare() {
  mkdir -p "$OUT" "$site" .dev/penstock
  [ -e .dev/penstock/v1 ] || ln -s ../../protos/penstock/v1 .dev/penstock/v1
  for room in clients kernels kv models scheduler service; do
    [ -e ".dev/penstock/$room" ] || ln -s "../../$room" ".dev/penstock/$room"
  done
  if ls .whl/*.whl >/dev/null 2>&1; then
    step wheels 60 "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" .whl/*.whl
  fi
  # The service asks for its own version.
  step version 20 "$PYTHON" -P -c "import setuptools; setuptools.setup()" -q egg_info --egg-base "$site"
}

facts() {
  step facts 20 bash -c "nvidia-smi; nvidia-smi -q -d CLOCK,POWER; uname -r; nproc; ulimit -l; $PYTHON -m pip list"
}
# Fills the cache in which later steps find their kernels.
compile() { step compile 90 "$PYTHON" -P -m penstock.kernels.aot ${COMPILE_MODELS:-}; } # all by default
tests() {
  pytest tests "${TESTS_SECONDS:-300}" -n 14 --durations=15 \
    ${TESTS:-tests/kernels/cuda $COMPILED
    tests/models/quantized/test_cuda_*.py tests/models/backends/test_cuda_backend.py tests/models/backends/cuda
    tests/models/backends/test_oracle.py::test_on_cuda}
}
kernels() { bench kernels "${KERNELS_SECONDS:-150}" ceilings kernels products accuracy; }
steps() { bench steps "${STEPS_SECONDS:-220}" ceilings "steps Qwen" "steps Llama"; }
service() { bench service "${SERVICE_SECONDS:-300}" "serving Qwen" "transformers Qwen" "serving Llama" "transformers Llama"; }
small_service() { bench small_service "${SMALL_SERVICE_SECONDS:-150}" "serving Qwen" "transformers Qwen"; }
# The service with the demo model, one of whose tests kills the worker; and KV that comes back from host memory. There is
# no CPU library, and the larger model would be in memory twice.
system() {
  pytest system "${SYSTEM_SECONDS:-200}" -n 4 -m gpu -k "not cpu and not Llama" --durations=15 \
    tests/models/backends/test_host_tier.py tests/service/app/test_backends.py
}
memcheck() { sanitize memcheck "${SANITIZER_SECONDS:-120}"; }
racecheck() { sanitize racecheck "${SANITIZER_SECONDS:-120}"; }
# A profiler that sets the clock would measure another GPU.
counters() {
  step counters "${COUNTERS_SECONDS:-150}" ncu --clock-control none --profile-from-start off --launch-count 60 \
    --section SpeedOfLight --section Occupancy --section WarpStateStats --csv --log-file "$OUT/counters.csv" \
    "$PYTHON" -P -m gpu_bench.kernels.launches ${COUNTED:-attention gemm torch.mm}
}
peers() { bench peers "${PEERS_SECONDS:-120}" ceilings peers; }
# The same steps with other choices, one after another, and other tiles of latent attention.
variants() { bench variants "${VARIANTS_SECONDS:-300}" ceilings latents variants; }

stages=()
for word in "$@"; do
  case $word in
  right) stages+=(facts compile tests kernels) ;;
  fast) stages+=(steps service) ;;
  whole) stages+=(small_service system memcheck racecheck) ;;
  why) stages+=(counters peers variants) ;;
  facts | compile | tests | kernels | steps | service) stages+=("$word") ;;
  small_service | system | memcheck | racecheck | counters | peers | variants) stages+=("$word") ;;
  *) stages=() && break ;;
  esac
done
if [ ${#stages[@]} -eq 0 ]; then
  sed -n '2,13s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
prepare
for stage in "${stages[@]}"; do "$stage"; done
