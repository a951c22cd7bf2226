# The HTTP service and its search page, on CPUs, for a mounted index:
#   docker build . -t quiver
#   docker run --rm -p 8080:8080 -v "$PWD/indexes/notes:/index:ro" quiver
# docs/serving.md says how to add a model that lies in a folder, and which build arguments name mirrors.
ARG BASE_IMAGE=python:3.12-slim

FROM ${BASE_IMAGE} AS build
# The CPU build of torch: the default one brings gigabytes of CUDA libraries.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG PIP_INDEX_URL
RUN python -m venv /opt/quiver
RUN /opt/quiver/bin/pip install --no-cache-dir --index-url "${TORCH_INDEX}" torch
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY encoder encoder
COPY retrieval retrieval
COPY eval eval
COPY recipes recipes
COPY quiver quiver
RUN /opt/quiver/bin/pip install --no-cache-dir '.[mcp]' && /opt/quiver/bin/pip uninstall --yes pip

FROM ${BASE_IMAGE}
RUN useradd --create-home --uid 10001 quiver
COPY --from=build /opt/quiver /opt/quiver
ENV PATH=/opt/quiver/bin:$PATH
USER quiver
WORKDIR /home/quiver
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=90s \
  CMD ["python", "-c", "import urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:8080/healthz', timeout=4)"]
ENTRYPOINT ["quiver"]
CMD ["serve", "/index", "--host", "0.0.0.0", "--port", "8080"]
