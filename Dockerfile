# syntax=docker/dockerfile:1
#
#   docker build --target cpu -t vitkit:cpu .
#   docker build --target cuda -t vitkit:cuda .      the libraries of CUDA come with PyTorch; the driver is the host's
#
#   docker run --rm -v "$PWD:/data" vitkit:cpu predict model.safetensors photos --out predictions.csv
#   docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD:/data:ro" vitkit:cpu serve model.safetensors --host 0.0.0.0
ARG PYTHON=python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1

# --- our wheel -----------------------------------------------------------------------------------
FROM ${PYTHON} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY src src
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# --- everything it needs, pinned, in one folder ----------------------------------------------------
FROM ${PYTHON} AS packages
ENV PATH=/opt/vitkit/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
COPY --from=wheel /wheels /wheels
RUN python -m venv /opt/vitkit

FROM packages AS packages-cpu
RUN pip install --no-cache-dir "$(grep '^torch==' constraints.txt)" --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir -c constraints.txt "$(ls /wheels/*.whl)[data,hub,explain,onnx,serve,zeroshot,ray]"

FROM packages AS packages-cuda
RUN pip install --no-cache-dir "$(grep '^torch==' constraints.txt)" \
    && pip install --no-cache-dir -c constraints.txt "$(ls /wheels/*.whl)[data,hub,explain,onnx,serve,zeroshot,ray]"

# --- what runs: no compiler, no pip cache, no root -------------------------------------------------
FROM ${PYTHON} AS base
RUN useradd --uid 10001 --create-home vitkit \
    && mkdir -p /data /var/cache/vitkit \
    && chown vitkit:vitkit /data /var/cache/vitkit
COPY deploy/docker/healthcheck.py /opt/healthcheck.py
ENV PATH=/opt/vitkit/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    VITKIT_CACHE=/var/cache/vitkit
WORKDIR /data
EXPOSE 8000
USER 10001:10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=6 CMD ["python", "/opt/healthcheck.py"]
ENTRYPOINT ["vitkit"]
CMD ["--help"]

FROM base AS cuda
COPY --from=packages-cuda /opt/vitkit /opt/vitkit

FROM base AS cpu
COPY --from=packages-cpu /opt/vitkit /opt/vitkit
