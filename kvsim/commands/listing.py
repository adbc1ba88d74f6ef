"""The commands of ``kvsim``, and its help."""

COMMANDS = {
    "simulate": "serve a trace in simulated time: hit rates, latencies, link use",
    "replay": "replay a trace without a clock: hit rates at full speed",
    "saturate": "find the highest rate of requests that meets objectives for latency",
    "curve": "plot hit rate against capacity: LRU exactly and in one pass, other policies by replay",
    "calibrate": "measure this machine or a server and write conf/hardware/NAME.yaml",
    "validate": "compare a simulated run with the same run on this machine's GPU, or with server=URL on vLLM or SGLang",
    "shadow": "watch running vLLM or SGLang servers: what other caches would find in the same requests",
    "serve": "answer over HTTP as vLLM or SGLang does, without a GPU",
    "report": "write one HTML page about any number of runs",
    "policies": "list the policies and their settings",
    "new": "create a working policy to start from, with settings and a test",
    "help": "describe a command, a group, a choice or a setting",
    "trace": "describe a trace, convert it into one that can be shared, or download a published one",
}
"""The commands that ``kvsim --help`` lists; each is a module of ``kvsim.commands`` with a function ``main(arguments)``."""


def usage() -> str:
    """The help of ``kvsim`` itself: its commands and flags."""
    commands = [f"  {name:<10} {purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join(
        [
            "usage: kvsim COMMAND ...",
            "",
            "Test KV cache policies for LLM servers on real traces.",
            "",
            "commands:",
            *commands,
            "",
            "Run kvsim COMMAND --help for details, kvsim help NAME for a policy, a model, a trace format or a setting.",
            "kvsim --install-completion completes commands, choices and settings with the Tab key. kvsim --version",
        ]
    )
