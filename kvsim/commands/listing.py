"""The commands of ``kvsim``, and its help."""

COMMANDS = {
    "simulate": "serve a trace in simulated time: hit rates, latencies, link use",
    "replay": "replay a trace without a clock: hit rates at full speed",
    "saturate": "find the highest rate of requests that meets objectives for latency",
    "plan": "find the cheapest configuration that meets objectives for latency, by your prices, and the flags to start it",
    "curve": "plot hit rate against capacity: LRU exactly and in one pass, other policies by replay",
    "leaderboard": "rank the policies of a family, yours among them, on traces and capacities, with noise, bounds and costs",
    "train": "train a model of which pages to keep, on a part of a trace, for eviction=learned",
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


OTHER_NAMES = {
    "sweep": "kvsim simulate -m or kvsim replay -m, which run all combinations of comma-separated values",
    "multirun": "kvsim simulate -m or kvsim replay -m",
    "compare": "kvsim report FOLDER ...",
    "show": "kvsim report FOLDER",
    "run": "kvsim simulate, or kvsim replay for hit rates without a clock",
    "sim": "kvsim simulate",
    "plot": "kvsim curve for hit rate against capacity, or kvsim report FOLDER",
    "mrc": "kvsim curve",
    "search": "kvsim saturate for the highest rate, or kvsim simulate -m hydra/sweeper=optuna",
    "optimize": "kvsim simulate -m hydra/sweeper=optuna",
    "rank": "kvsim leaderboard",
    "ranking": "kvsim leaderboard",
    "price": "kvsim plan prices=FILE",
    "cost": "kvsim plan prices=FILE",
    "bench": "kvsim simulate, or kvsim validate server=URL for a running server",
    "profile": "kvsim calibrate",
    "measure": "kvsim calibrate",
    "list": "kvsim policies, or kvsim help GROUP",
    "models": "kvsim help model",
    "config": "kvsim simulate --cfg job",
    "create": "kvsim new",
    "init": "kvsim new",
    "info": "kvsim trace info FILE",
    "stats": "kvsim trace info FILE",
    "convert": "kvsim trace convert FILE OUT",
    "fetch": "kvsim trace fetch NAME",
    "download": "kvsim trace fetch NAME",
    "version": "kvsim --version",
}
"""What users of other tools call a command, and what it is here."""


def usage() -> str:
    """The help of ``kvsim`` itself: its commands and flags."""
    commands = [f"  {name:<11} {purpose}" for name, purpose in COMMANDS.items()]
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
