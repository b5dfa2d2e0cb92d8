# Tidemark in a container: both binaries, and the PostgreSQL client for backups. Nothing is kept in it.
#
#   docker build --tag tidemark .
#   docker run --env NATS_URL --env DATABASE_URL … tidemark            serves
#   docker run --env NATS_URL --env DATABASE_URL … tidemark doctor     any other command of the binary
#
# Needs BuildKit (the default since Docker 23), for the caches below.

# 1.94 is the oldest that will do (Cargo.toml). The same Debian as below, or the binaries may ask for a newer libc than there is.
ARG RUST_VERSION=1.95
ARG DEBIAN=trixie

FROM rust:${RUST_VERSION}-slim-${DEBIAN} AS builder
WORKDIR /src
COPY . .
# What was fetched and compiled stays with the builder, so that a change of ours does not compile three hundred crates again.
# The caches are no part of the image: the binaries have to be copied out of them.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target,sharing=locked \
    cargo build --release --locked --bins \
    && install -D --target-directory=/out target/release/tidemark target/release/noid-tool

FROM debian:${DEBIAN}-slim
# Certificates for callbacks, and for servers with TLS. pg_dump must not be older than the server: trixie has 17, as
# docker-compose.yml has; another server needs another client here.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates postgresql-client-17 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 tidemark \
    && useradd --uid 10001 --gid tidemark --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin tidemark
COPY --from=builder /out/ /usr/local/bin/

# A tidemark.toml that is mounted here is read. The environment wins over it.
WORKDIR /etc/tidemark

# By number, so that a cluster can see that it is not root.
USER 10001:10001

# Loopback, the default, would be the container's own. Which network sees the port is decided where it is published.
ENV TIDEMARK__HTTP__HOST=0.0.0.0
EXPOSE 8080

# /ready answers within 4 s, whatever hangs; 503 says why in its body. Asked by bash itself, so no curl is needed. A process
# without the role "http" needs TIDEMARK__TELEMETRY__PORT; ports that only stand in tidemark.toml are not known here.
HEALTHCHECK --interval=5s --timeout=6s --start-period=60s --retries=3 \
    CMD ["bash", "-c", "exec 3<>\"/dev/tcp/127.0.0.1/${TIDEMARK__TELEMETRY__PORT:-${TIDEMARK__HTTP__PORT:-${PORT:-8080}}}\" && printf 'GET /ready HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n' >&3 && read -r _ status _ <&3 && [ \"$status\" = 200 ]"]

# SIGTERM drains; see shutdown.drain_timeout.
ENTRYPOINT ["tidemark"]
CMD ["serve"]
