#!/usr/bin/env bash
# Builds the CPU image without a registry of images and without a daemon, on a base that mmdebstrap makes from Debian's
# packages. Writes build/image/penstock.tar, which `docker load` and `podman load` read. Needs root, the wheels of
# `make wheels` in dist/, a package index, and Debian's packages buildah, crun, ca-certificates and mmdebstrap.
#
#     sudo deploy/docker/build_offline.sh
#
# Variables: BASE (an archive of a root file system, in place of mmdebstrap's), SUITE (bookworm), PYTHON (python3; it
# downloads the wheels, so it needs pip and the version of the base's Python), PACKAGE
# (penstock-llm[cpu,gateway,smg,zmq]).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

suite=${SUITE:-bookworm}
python=${PYTHON:-python3}
package=${PACKAGE:-"penstock-llm[cpu,gateway,smg,zmq]"}
output=build/image
base=${BASE:-$output/base-$suite.tar}

for program in buildah mmdebstrap; do
  command -v "$program" >/dev/null || { echo "$program is not installed (Debian: $program)" >&2; exit 1; }
done
compgen -G 'dist/*.whl' >/dev/null || { echo "dist/ has no wheels; run: make wheels" >&2; exit 1; }
mkdir -p "$output"

if [ ! -e "$base" ]; then
  mmdebstrap --format=tar --variant=minbase --include=ca-certificates,python3-venv "$suite" "$base.new"
  mv "$base.new" "$base"
fi

# Everything that pip installs, so that the build itself needs no network.
rm -rf "$output/context"
mkdir -p "$output/context/dist"
"$python" -m pip download --quiet --only-binary=:all: --find-links dist --constraint constraints.txt \
  --dest "$output/context/dist" "$package"
cp constraints.txt "$output/context/"

storage=$(mktemp -d)
buildah=(buildah --root "$storage/root" --runroot "$storage/run" --storage-driver vfs)
trap '"${buildah[@]}" rm --all >/dev/null || true; rm -rf "$storage"' EXIT

container=$("${buildah[@]}" from scratch)
"${buildah[@]}" add --quiet "$container" "$base" /
"${buildah[@]}" config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
"${buildah[@]}" commit --quiet --rm "$container" penstock-base

# The format: OCI's has no health check.
"${buildah[@]}" bud --isolation chroot --format docker --build-arg BASE=localhost/penstock-base \
  --build-arg PIP_NO_INDEX=1 --build-arg "PACKAGE=$package" --tag penstock -f deploy/docker/cpu.Dockerfile "$output/context"
rm -f "$output/penstock.tar"
"${buildah[@]}" push --quiet penstock "docker-archive:$output/penstock.tar:penstock:latest"
echo "wrote $output/penstock.tar"
