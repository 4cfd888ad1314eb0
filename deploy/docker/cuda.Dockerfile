# This file has not been built here, where no registry and no GPU could be reached. hadolint and tests read it.
# penstock on NVIDIA GPUs. First: make wheels. Then, in the root of the checkout:
#
#     docker build -f deploy/docker/cuda.Dockerfile -t penstock:0.1.0-cuda .
#     docker run --gpus all ...
#
# docs/docker.md describes how to run it. The default of BASE is a tag; replace it by a digest for builds that can be
# repeated. torch brings CUDA's libraries with it, so BASE has only the runtime without cuBLAS and cuDNN.
ARG BASE=docker.io/nvidia/cuda:13.0.1-base-ubuntu24.04

FROM ${BASE} AS builder
ARG PACKAGE="penstock-llm[cuda,gateway,smg,zmq]"
# Both are variables that pip reads: PIP_NO_INDEX=1 installs only from dist/, PIP_INDEX_URL is your own package index.
ARG PIP_NO_INDEX
ARG PIP_INDEX_URL
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt dist/*.whl /wheels/
# The image needs no pip. torch needs setuptools.
RUN python3 -m venv /opt/penstock \
    && /opt/penstock/bin/pip install --no-cache-dir --find-links /wheels --constraint /wheels/constraints.txt "${PACKAGE}" \
    && /opt/penstock/bin/pip uninstall --yes pip

FROM ${BASE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="penstock" \
      org.opencontainers.image.description="A gRPC service that streams tokens from language models, on NVIDIA GPUs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# Triton compiles a launcher in C for each kernel when it first runs. Ubuntu keeps only the newest version of a package, so
# a pinned one could not be installed for long.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev python3 python3-dev \
    && rm -rf /var/lib/apt/lists/*
# The user of the Helm chart, and the folders that it mounts volumes on.
RUN groupadd --gid 10001 penstock \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin penstock \
    && install -d -o 10001 -g 10001 /cache /models
COPY --from=builder /opt/penstock /opt/penstock
# The root file system may be read-only: caches are in /cache, models in /models, everything else in /tmp.
# USER: torch looks for the user's name, also if the container runs as a user without an entry in /etc/passwd.
ENV PATH=/opt/penstock/bin:$PATH \
    HOME=/tmp \
    USER=penstock \
    XDG_CACHE_HOME=/cache \
    TRITON_CACHE_DIR=/cache/triton \
    HF_HOME=/models
USER 10001:10001
WORKDIR /tmp
# gRPC, metrics, OpenAI's API. All listeners stay on 127.0.0.1 until a flag or variable says otherwise.
EXPOSE 50051 50053 8000
STOPSIGNAL SIGTERM
# The metrics listener knows whether the service is ready. A proxy that the environment names must not answer for it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python3", "-c", "from urllib.request import ProxyHandler, build_opener; build_opener(ProxyHandler({})).open('http://127.0.0.1:50053/readyz', timeout=4)"]
ENTRYPOINT ["penstock"]
CMD ["serve"]
