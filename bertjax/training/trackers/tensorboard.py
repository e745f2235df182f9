"""The TensorBoard tracker, which writes event files to WORKDIR/tensorboard."""

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from bertjax.common.files import GrowingFile


class TensorBoard:
    """Writes an event file per process of a run.

    Does not use `EventFileWriter` of TensorBoard, which imports TensorFlow; this import takes seconds.
    """

    def __init__(self, workdir: epath.Path, start_step: int, config: ConfigDict):
        """Opens an event file, and writes an event that marks a restart at the step after `start_step`."""
        del config
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = GrowingFile(workdir / "tensorboard" / name)
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        # After a START event, TensorBoard ignores this step and later steps in earlier files.
        self._write(step=start_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes an event with the metrics of a step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=Summary(value=values))

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def flush(self) -> None:
        """Uploads the events if the workdir is in an object store."""
        self._file.flush()

    close = flush
