# Fivefold with PyTorch, for GPUs and CPUs. Reviewed and linted, but not built by its authors: no container engine was at
# hand. docs/clusters.md says how to use it.
#
#   docker build -t fivefold .
#   docker run --rm fivefold plan llama3-8b --cluster 8xH100
#   docker run --rm --init --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD:/work" fivefold train job.toml --nproc 8
#
# PyTorch's wheels bring CUDA, cuDNN and NCCL along; the driver is the host's (NVIDIA Container Toolkit).
FROM python:3.12-slim-bookworm

# gcc: torch.compile builds small launchers at run time. The rest lets NCCL use InfiniBand and RoCE.
# Debian's stable release pins the versions; exact ones would vanish from its mirrors with the next security fix.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev ibverbs-providers libibverbs1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/*

# pyproject.toml says which releases of PyTorch are known to work.
ARG EXTRAS=train
COPY pyproject.toml setup.py README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir "/src[${EXTRAS}]"

# Not root: what a run writes belongs to uid 1000, or to whoever `docker run --user` names; HOME holds caches.
RUN useradd --create-home --uid 1000 fivefold && mkdir /work && chown fivefold /work && chmod 1777 /home/fivefold
ENV HOME=/home/fivefold PYTHONUNBUFFERED=1
USER 1000
WORKDIR /work
ENTRYPOINT ["fivefold"]
CMD ["--help"]
