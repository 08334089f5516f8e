# syntax=docker/dockerfile:1
# hadolint global ignore=DL3008,DL3013
#
# docker build --target cpu  -t shardwright:cpu .
# docker build --target cuda -t shardwright:cuda .
# docker run --rm shardwright:cpu verify --layout "dp2 tp2"
# docker run --rm --gpus all -v "$PWD/runs:/work/runs" shardwright:cuda train --layout dp8 --out runs/first
#
# Packages have no fixed versions here, on purpose: an image that is built anew has their security updates.
# torch's wheels have the CUDA libraries inside: a card needs only its driver on the host, and NVIDIA's container runtime.
# For the smaller CPU build give its index, as pytorch.org names it: --build-arg PIP_EXTRA_INDEX_URL=...

ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON_VERSION}-slim AS base
# a C++ compiler for the word "compile" of a layout
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 ranks && mkdir /work && chown ranks /work
ENV PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1

FROM base AS cpu
ARG PIP_EXTRA_INDEX_URL=
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir /wheels/*.whl tensorboard
USER 1000
WORKDIR /work
ENTRYPOINT ["shardwright"]
CMD ["--help"]

FROM base AS cuda
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir /wheels/*.whl tensorboard
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /work
ENTRYPOINT ["shardwright"]
CMD ["--help"]
