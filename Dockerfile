# bertjax in a container for a device: cpu, cuda for NVIDIA GPUs (CUDA is in the wheels; the host has the driver and
# NVIDIA's container toolkit), or tpu for a TPU VM. docker/DEVICE.txt lists the installed packages; docker/lock updates
# these files.
#
#   docker build --build-arg DEVICE=cuda -t bertjax .
#   docker run --gpus=all --volume="$PWD:/work" bertjax train --config=small:mini --config.data.corpus=texts/
FROM --platform=linux/amd64 python:3.12-slim
ARG DEVICE=cuda
COPY docker/$DEVICE.txt /bertjax/lock.txt
RUN pip install --no-cache-dir --no-deps --requirement=/bertjax/lock.txt
COPY setup.py pyproject.toml README.md LICENSE /bertjax/
COPY bertjax /bertjax/bertjax
COPY experiments /bertjax/experiments
RUN pip install --no-cache-dir --no-deps /bertjax
WORKDIR /work
ENTRYPOINT ["bertjax"]
CMD ["--help"]
