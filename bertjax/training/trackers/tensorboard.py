"""TensorBoard's event files, in WORKDIR/tensorboard."""

import os
import socket
import time
from collections.abc import Mapping

from etils import epath

from bertjax.common.files import GrowingFile


class TensorBoard:
    """Writes a file of its own for each process of a run, which begins with the number of the first step to come.

    TensorBoard's own EventFileWriter imports TensorFlow, which takes seconds.
    """

    def __init__(self, workdir: epath.Path, start_step: int, config):
        del config
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = GrowingFile(workdir / "tensorboard" / name)
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        # Has TensorBoard leave out what earlier files have of this step and later ones.
        self._write(step=start_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=Summary(value=values))

    def _write(self, **fields) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.flush()
