# Runs kvsim without installing anything: docker build -t kvsim . && docker run --rm kvsim
# Keep the results of a run: docker run --rm -v "$PWD/outputs:/kvsim/outputs" kvsim kvsim replay eviction=slru output=outputs/slru
FROM python:3.12-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /kvsim
COPY . .
RUN make .venv/installed
ENV PATH="/kvsim/.venv/bin:$PATH"

CMD ["make", "demo"]
