# bertjax in a container, by an extra of setup.py: cuda for NVIDIA GPUs (CUDA is in the wheels; the host has the driver
# and NVIDIA's container toolkit), tpu for a TPU VM, test for neither.
#
#   docker build --build-arg EXTRA=cuda -t bertjax .
#   docker run --gpus=all --volume="$PWD:/work" bertjax train --config=experiments/small.py:mini --config.data.corpus=texts/
FROM python:3.12-slim
ARG EXTRA=cuda
COPY setup.py pyproject.toml README.md LICENSE /bertjax/
COPY bertjax /bertjax/bertjax
COPY experiments /bertjax/experiments
RUN pip install --no-cache-dir "/bertjax[$EXTRA]"
WORKDIR /work
ENTRYPOINT ["bertjax"]
CMD ["--help"]
