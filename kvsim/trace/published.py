"""Published traces: where they are, under which licence, and what their files must contain."""

import fnmatch
import os
import re
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.json import decode, encode

from kvsim.errors import UsageError
from kvsim.files.locking import Lock
from kvsim.files.writing import replacing
from kvsim.trace.convert import compressed
from kvsim.trace.records import extents_of

MOONCAKE = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/9fbd622256e7a26aeea9f038e316eeb58203c102/FAST25-release"
BAILIAN = (
    "https://media.githubusercontent.com/media/alibaba-edu/qwen-bailian-usagetraces-anon/5f7439c51ec248a0c585f7d90a41a6f57773b912"
)
AZURE = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data"
PREFIXCACHE = "https://huggingface.co/datasets/harvardMadsys/2026_prefixcache/resolve/main"
AGENTIC = "https://huggingface.co/datasets/harvardMadsys/freeinference_agentic_trace/resolve/main"
BURSTGPT = "https://github.com/HPMLL/BurstGPT/releases/download/v2.0"


class Published(NamedTuple):
    """A trace that can be fetched."""

    about: str
    url: str
    licence: str
    megabytes: int | None
    """Size of the file, about; None if it is not known here."""
    sha256: str | None
    """What the file must hash to; None if it is not known here: the first download is then trusted and its hash stored."""
    settings: str = ""
    """Settings that a run needs beside the path."""
    members: str = ""
    """Pattern of the JSON files in a tar archive that are joined to one trace; empty if the file is the trace."""
    joined: str = ""
    """The name under which it is stored, of a joined trace or where the URL's own says too little; empty: that of the URL."""

    @property
    def file(self) -> str:
        """The name under which it is stored."""
        return self.joined or self.url.rpartition("/")[2]


TRACES = {
    "mooncake_conversation": Published(
        "Mooncake, FAST 2025: conversations, 12,031 requests",
        f"{MOONCAKE}/traces/conversation_trace.jsonl",
        "Apache-2.0",
        3,
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
    ),
    "mooncake_toolagent": Published(
        "Mooncake, FAST 2025: tools and agents",
        f"{MOONCAKE}/traces/toolagent_trace.jsonl",
        "Apache-2.0",
        4,
        "48a2db1a13d3bc05e6330140c64f604ba366df20d3c9e128b5c35a01c1fa5f71",
    ),
    "mooncake_synthetic": Published(
        "Mooncake, FAST 2025: synthetic",
        f"{MOONCAKE}/traces/synthetic_trace.jsonl",
        "Apache-2.0",
        1,
        "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
    ),
    "mooncake_arxiv": Published(
        "Mooncake: the trace of the first paper",
        f"{MOONCAKE}/arxiv-trace/mooncake_trace.jsonl",
        "Apache-2.0",
        6,
        "b434f1816a707f4bac697235588184ebc374c9907cb981bb65fb0643471fe711",
    ),
    "bailian_a": Published(
        "Qwen-Bailian, ATC 2025: consumers",
        f"{BAILIAN}/qwen_traceA_blksz_16.jsonl",
        "Apache-2.0",
        56,
        "07cedc9ed8aff301994ac68ed4aede8123b7603673575eeba9dd677de663db17",
    ),
    "bailian_b": Published(
        "Qwen-Bailian, ATC 2025: businesses",
        f"{BAILIAN}/qwen_traceB_blksz_16.jsonl",
        "Apache-2.0",
        96,
        "68e3f98e2d601d60d0abf4b89bc8a3654372abab7b1cde6373a13d0054379d59",
    ),
    "bailian_coder": Published(
        "Qwen-Bailian: code generation",
        f"{BAILIAN}/qwen_coder_blksz_16.jsonl",
        "Apache-2.0",
        132,
        "3d74974cebb7bccb69b1ca6ea210a44d9a3033443c0271ed015327284dea1aff",
    ),
    "bailian_thinking": Published(
        "Qwen-Bailian: a model that thinks",
        f"{BAILIAN}/qwen_thinking_blksz_16.jsonl",
        "Apache-2.0",
        28,
        "41ac36d9d1b54d084eeb6b05e9d142ba9d02f8bf79cfc9fff418d8ab7cdee906",
    ),
    "weka": Published(
        "WEKA's kv-cache-tester: sessions of coding agents",
        "https://github.com/callanjfox/kv-cache-tester/archive/HEAD.tar.gz",
        "Apache-2.0",
        None,
        None,
        members="*/traces/trace_*.json",
        joined="weka.jsonl.zst",
    ),
    "freeinference_day": Published(
        "FreeInference's agentic trace: its first day, 2026-05-17, sessions of agents with sub-agents",
        f"{AGENTIC}/release/2026-05-17_2026-05-23/traces/2026-05-17.jsonl.zst",
        "CC-BY-4.0",
        None,
        None,
        joined="freeinference_2026-05-17.jsonl.zst",
    ),
    "freeinference_blocks": Published(
        "FreeInference, arXiv:2609.28870: agents, 327,548 requests",
        f"{PREFIXCACHE}/freeinference.lcp.zst",
        "CC-BY-4.0",
        76,
        None,
    ),
    "chutes_blocks": Published(
        "Chutes, arXiv:2609.28870: chat and roleplay, 515,817 requests",
        f"{PREFIXCACHE}/chutes.lcp.zst",
        "CC-BY-4.0",
        232,
        None,
    ),
    "azure_conversation": Published(
        "Azure LLM inference 2023: chat, lengths only",
        f"{AZURE}/AzureLLMInferenceTrace_conv.csv",
        "CC-BY-4.0",
        1,
        None,
        "trace.prefixes=0.5",
    ),
    "azure_code": Published(
        "Azure LLM inference 2023: code, lengths only",
        f"{AZURE}/AzureLLMInferenceTrace_code.csv",
        "CC-BY-4.0",
        1,
        None,
        "trace.prefixes=0.5",
    ),
    "burstgpt": Published(
        "BurstGPT: two months of ChatGPT and GPT-4, lengths only",
        f"{BURSTGPT}/BurstGPT_1.csv",
        "CC-BY-4.0",
        50,
        "4bb3783693d0a435686fbfc885615d2349bd067239079fa4b749f2e679e12122",
        "trace.prefixes=0.5",
    ),
}
"""The hash of Mooncake's conversation trace was computed from the file; the others are those of a public catalogue of traces that
agrees with it."""


def cache_folder() -> Path:
    """Return the folder of fetched traces: ``KVSIM_CACHE``, or the user's cache folder."""
    if named := os.environ.get("KVSIM_CACHE"):
        return Path(named)
    import pooch

    return Path(pooch.os_cache("kvsim"))


def fetch(name: str, trace: Published) -> tuple[Path, str]:
    """Return the file of a trace, downloaded unless it is there already, and what was checked.

    A file whose hash is unknown is trusted the first time; its hash is then stored in ``FILE.sha256`` beside it, and checked from
    then on. Raises UsageError if it cannot be downloaded, or is not what was expected.
    """
    import pooch

    pooch.get_logger().setLevel("CRITICAL")  # errors are raised, and what was done is returned
    with Lock(cache_folder(), f".{trace.file}.lock", subject="KVSIM_CACHE"):
        return _fetched(name, trace, cache_folder())


def _fetched(name: str, trace: Published, folder: Path) -> tuple[Path, str]:
    """Fetch a trace into the folder, which the caller has locked."""
    import pooch

    stored = folder / f"{trace.file}.sha256"
    if trace.members and (folder / trace.file).is_file():
        return folder / trace.file, f"downloaded before, as {stored.name} says"
    expected = trace.sha256 or _stored_hash(stored)
    path = _download(name, trace, folder, expected)
    found = pooch.file_hash(str(path), alg="sha256")
    if trace.members:
        path = _joined(path, folder / trace.file, trace.members)
    if expected:
        return path, "its sha256 is the expected one"
    with replacing(stored) as file:
        file.write(f"{found}\n".encode())
    return path, f"no published checksum exists: sha256 {found} is stored in {stored.name} and checked from now on"


def _stored_hash(path: Path) -> str | None:
    """Return the hash that an earlier download has stored; None if there is none. Raises UsageError."""
    try:
        text = path.read_bytes().strip().decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise UsageError(f"{path} is damaged: remove it, and the trace beside it is trusted anew")
    return text


def _download(name: str, trace: Published, folder: Path, expected: str | None) -> Path:
    import pooch
    import requests

    try:
        path = pooch.retrieve(
            trace.url,
            known_hash=f"sha256:{expected}" if expected else None,
            fname=trace.url.rpartition("/")[2] if trace.members else trace.file,
            path=folder,
            downloader=pooch.HTTPDownloader(progressbar=False, timeout=60),
        )
    except ValueError as error:
        again = "" if trace.sha256 else f"; remove {trace.file}.sha256 in {folder} to trust it anew"
        raise UsageError(f"{name}: {trace.url} is not the file that was expected: {_first_line(error)}{again}") from None
    except requests.ConnectionError:
        raise UsageError(
            f"{name}: cannot reach the server of {trace.url}; a file downloaded elsewhere belongs into {folder}"
        ) from None
    except OSError as error:
        raise UsageError(f"{name}: cannot download {trace.url}: {_first_line(error)}") from None
    return Path(path)


def _joined(archive: Path, out: Path, pattern: str) -> Path:
    """Join the JSON files of an archive, in order of their names, to lines with packed ids; the archive is removed.

    Raises UsageError if it has no such files.
    """
    try:
        with tarfile.open(archive) as tar, replacing(out) as file, compressed(out.name, file) as stream:
            members = sorted(fnmatch.filter(tar.getnames(), pattern))
            if not members:
                raise UsageError(f"{archive} has no files {pattern}")
            for member in members:
                content = tar.extractfile(member)
                if content is None:
                    raise UsageError(f"{archive}: {member} is not a file")
                stream.write(encode(_packed(decode(content.read()))) + b"\n")
    except (tarfile.TarError, ValueError, TypeError, EOFError) as error:
        raise UsageError(f"{archive} cannot be read: {_first_line(error)}") from None
    finally:
        archive.unlink(missing_ok=True)
    return out


def _packed(fields: Any) -> Any:
    """Return a session of WEKA's with extents of ids instead of ids."""
    if isinstance(fields, list):
        return [_packed(item) for item in fields]
    if not isinstance(fields, dict):
        return fields
    ids = fields.pop("hash_ids", None)
    packed = {name: _packed(value) if name == "requests" else value for name, value in fields.items()}
    return packed if ids is None else packed | {"hash_ids_rle": [number for extent in extents_of(ids) for number in extent]}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
