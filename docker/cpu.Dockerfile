# rltrain without a GPU: the quickstart, dry runs, conversion of checkpoints, the tests.
#
#   docker build -f docker/cpu.Dockerfile -t rltrain:cpu .
#   docker run --rm --shm-size 2g rltrain:cpu bash launch/quickstart.sh --out /tmp/quickstart
#
# To pin the base: --build-arg BASE=python@sha256:DIGEST
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# g++ for the copies of the weight sync, bubblewrap for rewards and tools that run programs
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/rltrain
COPY . .
RUN RLTRAIN_NATIVE=require bash -c 'source launch/environment.sh && prepare_environment'

ENV HOME=/tmp OMP_NUM_THREADS=1 PATH=/opt/rltrain/.venv/bin:$PATH USER=rltrain
USER 1000:1000
CMD ["rltrain", "--help"]
