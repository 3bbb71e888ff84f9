# The image: one virtual environment, no compiler, no pip inside it, not root, nothing written outside the volume.
#
#   docker build -t sidecar .
#
# Beside an application it shares that application's network, so loopback (the default) is where both meet:
#
#   docker run --network container:app --read-only --cap-drop ALL -v sidecar-state:/var/lib/sidecar sidecar
#
# It runs with no configuration file at all. With one, mount it and name it; naming is explicit so that a mount
# that went missing is an error at start rather than a proxy quietly running on defaults:
#
#   docker run … -v ./sidecar.yaml:/etc/sidecar/sidecar.yaml:ro sidecar run -c /etc/sidecar/sidecar.yaml
#
# (or -e SIDECAR_CONFIG=/etc/sidecar/sidecar.yaml). Single values: -e SIDECAR__LISTEN__PORT=8080.

ARG PYTHON_VERSION=3.13

FROM python:${PYTHON_VERSION}-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src

# Dependencies first: this layer changes only when the lock does.
COPY requirements.lock requirements-build.lock ./
RUN python -m venv --without-pip /opt/sidecar \
 && python -m pip --python /opt/sidecar/bin/python install --require-hashes -r requirements.lock \
 && python -m pip install --require-hashes -r requirements-build.lock

# The wheel is built by the setuptools just installed, whose hash was checked: --no-build-isolation fetches nothing.
# Installing also compiles to bytecode, which a read-only root could not do later.
COPY pyproject.toml README.md LICENSE ./
COPY sidecar ./sidecar
COPY telemetry ./telemetry
COPY config ./config
RUN python -m pip wheel --no-build-isolation --no-deps --wheel-dir /dist . \
 && python -m pip --python /opt/sidecar/bin/python install --no-index --no-deps /dist/*.whl \
 && /opt/sidecar/bin/sidecar schema > /dev/null


FROM python:${PYTHON_VERSION}-slim
# The commit it is built from, for `sidecar_build_info`: --build-arg REVISION=$(git rev-parse HEAD)
ARG REVISION=
LABEL org.opencontainers.image.title="sidecar" \
      org.opencontainers.image.description="An observability-first HTTP proxy" \
      org.opencontainers.image.licenses="Apache-2.0"

# A number rather than a name, so that an orchestrator can see that it is not root. The directory belongs to that
# user before it becomes a volume: a new volume takes over owner and mode.
RUN groupadd --gid 10001 sidecar \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin sidecar \
 && install -d -m 0700 -o 10001 -g 10001 /var/lib/sidecar \
 && install -d -m 0755 /etc/sidecar

COPY --from=build /opt/sidecar /opt/sidecar

ENV PATH=/opt/sidecar/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    SIDECAR_REVISION=${REVISION} \
    SIDECAR__STATE_DIR=/var/lib/sidecar

USER 10001:10001
WORKDIR /var/lib/sidecar
VOLUME /var/lib/sidecar

# The proxy, its admin interface, and `probes`. All listen on loopback unless the configuration says otherwise.
EXPOSE 4140 4141 4142

# Finds `probes` or the admin port wherever the configuration put it: from the environment, or from the file that the
# process in here was started with.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10s --retries=3 CMD ["sidecar", "health"]

ENTRYPOINT ["sidecar"]
CMD ["run"]
