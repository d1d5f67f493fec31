# One image for every service; the command says which. Any Debian-like base with Python 3.11 or newer, or with apt to get it.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# An index with other builds of torch; empty takes the package index's own, which on Linux carries CUDA.
ARG TORCH_INDEX=
# Extras of pyproject.toml, separated by commas.
ARG EXTRAS=math

RUN command -v python3 >/dev/null || (apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*)
RUN useradd --create-home --uid 10001 agentrl \
    && mkdir /data && chown agentrl /data \
    && python3 -m venv /opt/agentrl
ENV PATH=/opt/agentrl/bin:$PATH \
    AGENTRL_HOME=/data \
    AGENTRL_IMAGE=1 \
    HF_HOME=/data/hub \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# What agentrl needs comes first, so that a change of its code does not fetch torch again.
WORKDIR /src
COPY pyproject.toml constraints.txt hatch_build.py ./
COPY agentrl/__init__.py agentrl/
RUN touch README.md && pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} ".[${EXTRAS}]"
COPY LICENSE README.md ./
COPY agentrl agentrl
RUN pip install --no-deps --force-reinstall . \
    && for name in workflow workers cli migrations; do ln -s agentrl/$name $name; done

USER agentrl
WORKDIR /data
CMD ["agentrl", "--help"]
