# thinwire and torch for GPUs and CPUs. Build and try it:
#   docker build -t thinwire .
#   docker run --rm thinwire thinwire train --ranks 2 --epochs 1
# Slow links (--link) need more rights: docker run --cap-add SYS_ADMIN --cap-add NET_ADMIN
FROM python:3.12-slim
COPY pyproject.toml constraints.txt README.md LICENSE /opt/thinwire/
COPY src /opt/thinwire/src
RUN pip install --no-cache-dir -c /opt/thinwire/constraints.txt /opt/thinwire
WORKDIR /work
CMD ["thinwire", "--help"]
