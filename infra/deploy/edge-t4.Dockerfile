# A rank replica (edge or rerank) with TensorRT, for a Ray worker with an NVIDIA GPU from Turing (T4) on. No torch.
#
#   docker build -f infra/deploy/edge-t4.Dockerfile -t trirank-t4 .
#
# BUILD needs CUDA 13's headers, because pycuda is compiled; RUN needs only the driver's library, which the container
# runtime brings along. PYTHON has to be the version that the rest of the Ray cluster runs.
ARG BUILD=nvidia/cuda:13.0.1-devel-ubuntu24.04
ARG RUN=nvidia/cuda:13.0.1-base-ubuntu24.04

FROM ${BUILD} AS build
ARG PYTHON=3.12
RUN apt-get update \
 && apt-get install -y --no-install-recommends python${PYTHON} python${PYTHON}-dev python${PYTHON}-venv g++ \
 && rm -rf /var/lib/apt/lists/*
RUN python${PYTHON} -m venv /opt/trirank
WORKDIR /src
COPY infra/constraints.txt infra/constraints.txt
COPY infra/deploy infra/deploy
RUN /opt/trirank/bin/pip install --no-cache-dir -c infra/constraints.txt -r infra/deploy/edge-t4.requirements.txt
COPY . .
RUN /opt/trirank/bin/pip install --no-cache-dir --no-deps .

FROM ${RUN}
ARG PYTHON=3.12
RUN apt-get update \
 && apt-get install -y --no-install-recommends python${PYTHON} \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/trirank /opt/trirank
ENV PATH=/opt/trirank/bin:${PATH}
# The image holds no release: mount it, and RELEASE.engines beside it, where the other machines have them.
CMD ["bash", "-c", "exec ray start --address=\"$RAY_ADDRESS\" --block"]
