# penstock on CPUs, without torch. First: make wheels. Then, in the root of the checkout:
#
#     docker build -f deploy/docker/cpu.Dockerfile -t penstock:0.1.0 .
#
# docs/docker.md describes how to run it, and how to build it without a registry. The default of BASE is a tag; replace it
# by a digest (python@sha256:...) for builds that can be repeated. BASE needs Python 3.11 to 3.13 with venv, and useradd.
ARG BASE=docker.io/library/python:3.12-slim-bookworm

FROM ${BASE} AS builder
ARG PACKAGE="penstock-llm[cpu,gateway,smg,zmq]"
# Both are variables that pip reads: PIP_NO_INDEX=1 installs only from dist/, PIP_INDEX_URL is your own package index.
ARG PIP_NO_INDEX
ARG PIP_INDEX_URL
COPY constraints.txt dist/*.whl /wheels/
# The image needs no pip. setuptools comes with it before Python 3.12.
RUN python3 -m venv /opt/penstock \
    && /opt/penstock/bin/pip install --no-cache-dir --find-links /wheels --constraint /wheels/constraints.txt "${PACKAGE}" \
    && /opt/penstock/bin/pip uninstall --yes pip setuptools

FROM ${BASE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="penstock" \
      org.opencontainers.image.description="A gRPC service that streams tokens from language models, on CPUs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# The user of the Helm chart, and the folders that it mounts volumes on.
RUN groupadd --gid 10001 penstock \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin penstock \
    && install -d -o 10001 -g 10001 /cache /models
COPY --from=builder /opt/penstock /opt/penstock
# The root file system may be read-only: caches are in /cache, models in /models, everything else in /tmp.
ENV PATH=/opt/penstock/bin:$PATH \
    HOME=/tmp \
    XDG_CACHE_HOME=/cache \
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
