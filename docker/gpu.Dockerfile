# rltrain on NVIDIA GPUs, with SGLang in an environment of its own. No image was built of it yet: that takes a network
# and 40 GB of disk. Its packages are those of pyproject.toml and launch/constraints-sglang.txt.
#
#   docker build -f docker/gpu.Dockerfile -t rltrain:gpu .
#   docker run --rm --gpus all --ipc host --ulimit memlock=-1 rltrain:gpu rltrain doctor
#
# To pin the base: --build-arg BASE=nvidia/cuda@sha256:DIGEST
ARG BASE=nvidia/cuda:13.2.0-cudnn-devel-ubuntu24.04
FROM ${BASE}
ARG TORCH=2.15.0
ARG CUDA_ARCHITECTURES="80;90a;100a"

RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap g++ git python3-dev python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*

# torch goes first and alone, so that nothing that needs it chooses another build.
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir "torch==${TORCH}" "setuptools>=77" wheel
RUN python3 -m venv /opt/sglang
WORKDIR /opt/rltrain
COPY launch/constraints-sglang.txt launch/
RUN /opt/sglang/bin/pip install --no-cache-dir --requirement launch/constraints-sglang.txt

# Faster layers, and attention over sequences that several GPUs share; it compiles against torch for some minutes.
RUN /opt/venv/bin/pip install --no-cache-dir --no-build-isolation "transformer-engine[pytorch]==2.*"
COPY . .
RUN RLTRAIN_NATIVE=require RLTRAIN_CUDA_ARCHITECTURES="${CUDA_ARCHITECTURES}" \
    /opt/venv/bin/pip install --no-cache-dir --no-build-isolation --editable ".[wandb,tensorboard]"

ENV HOME=/tmp OMP_NUM_THREADS=1 PATH=/opt/venv/bin:$PATH USER=rltrain \
    RLTRAIN_PYTHON=/opt/venv/bin/python RLTRAIN_SGLANG_PYTHON=/opt/sglang/bin/python
USER 1000:1000
CMD ["rltrain", "doctor"]
